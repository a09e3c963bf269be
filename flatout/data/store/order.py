"""The order in which sequences are read: a closed form of (seed, epoch, index).

Nothing is stored or shuffled in memory: an epoch is a keyed permutation of range(num_sequences),
evaluated on demand. A position is one integer, seeking is free, and the order is the same for any
number of ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

ROUNDS = 8
"""Feistel rounds: four already look random. Eight add a margin and cost microseconds per step."""


def shuffled(positions: NDArray[np.integer], num_sequences: int, *, seed: int) -> NDArray[np.int64]:
    """Return the sequence at each position of an endless order, permuted anew in each epoch.

    Position p is in epoch p // num_sequences. A Feistel network on the next power of four permutes
    at least num_sequences numbers. Repeating it until the result is below num_sequences makes it a
    permutation of exactly those. These constants are part of a run's format: changing one changes
    what a resumed run reads next.

    Shapes:  positions (N,), integers from 0; returns (N,).
    Cost:    O(1) per position, for any num_sequences.
    Source:  cycle walking, Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    flat = np.asarray(positions).astype(np.uint64)
    epochs, indices = np.divmod(flat, np.uint64(num_sequences))
    half_bits = (max(num_sequences - 1, 0).bit_length() + 1) // 2
    if (epochs == epochs[:1]).all():
        epochs = epochs[:1]  # as nearly always: one key for all
    keys = np.broadcast_to(_mix(_mix(np.full_like(epochs, seed % (1 << 64))) + epochs), flat.shape)
    sequences = _permute(indices, keys, half_bits)
    outside = np.flatnonzero(sequences >= num_sequences)
    while len(outside):
        sequences[outside] = _permute(sequences[outside], keys[outside], half_bits)
        outside = outside[sequences[outside] >= num_sequences]
    return sequences.astype(np.int64)


def _permute(values: Words, keys: Words, half_bits: int) -> Words:
    """Apply one keyed permutation of range(4 ** half_bits) to each value."""
    bits, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & low
    for number in range(1, ROUNDS + 1):
        left, right = (
            right,
            left ^ (_mix(keys + right * np.uint64(2 * ROUNDS + 1) + np.uint64(number)) & low),
        )
    return (left << bits) | right


def _mix(words: Words) -> Words:
    """Scramble 64-bit words, one to one (the finaliser of SplitMix64, Steele et al. 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
