"""Checkpoints of temporal-eigenstate-networks: its FFT layer is flatout's recurrence, unfolded.

Letters: D width, K eigenstates, J eigenstates per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import ConfigError
from flatout.models.eigenstate import GOLDEN, RESONANCE, EigenstateConfig
from flatout.models.families.table import OTHER_MODEL, Architecture, Shapes, TensorMap, tensors_of
from flatout.storage.json_io import JsonObject

FIRST = "layers.0"


def recognise(shapes: Shapes, _others: JsonObject) -> JsonObject | None:
    """Return the `model.` keys that the shapes tell, or None for a different family.

    Raises: ConfigError for a selective layer: its eigenvalues depend on the token in a different
    way.
    """
    known = (f"{FIRST}.in_proj.weight", f"{FIRST}.log_decay", "token_emb.weight", "pos_emb.weight")
    if not all(name in shapes for name in known):
        return None
    if f"{FIRST}.select_proj.weight" in shapes:
        raise ConfigError(
            "The base model has selective eigenvalues. flatout reads the FFT layer, whose "
            "eigenvalues are fixed.",
            fix=OTHER_MODEL,
        )
    vocab_size, width = shapes["token_emb.weight"]
    return {
        "kind": "eigenstate",
        "vocab_size": vocab_size,
        "d_model": width,
        "num_layers": sum(name.endswith(".log_decay") for name in shapes),
        "num_eigenstates": shapes[f"{FIRST}.log_decay"][0],
        "num_heads": sum(name.startswith(f"{FIRST}.coupling_blocks.") for name in shapes),
        "d_ff": shapes[f"{FIRST}.mlp.0.weight"][0],
        "bias": True,
        "positions": "learned",
        "max_seq_len": shapes["pos_emb.weight"][0],
        "tied_head": True,
    }


def _log_rate(decay_K: Tensor) -> Tensor:
    """Return log_rate for a magnitude of sigmoid(decay), in fp64: exp(-exp(log_rate)) is equal."""
    return functional.softplus(-decay_K.double()).log()


def _drive(parts: Sequence[Tensor]) -> Tensor:
    """Return the drive's weight without the gain that flatout applies, sqrt(1 - magnitude^2)."""
    drive_ED, decay_K = parts
    gain_K = (-torch.expm1(-2 * _log_rate(decay_K).exp())).sqrt()
    return drive_ED.double() / torch.cat((gain_K, gain_K))[:, None]


def _detuning(parts: Sequence[Tensor]) -> Tensor:
    """Return the angles, relative to flatout's initial ones, in units of the decay rate."""
    decay_K, frequency_K = parts
    index_K = torch.arange(1, len(decay_K) + 1, dtype=torch.float64, device=decay_K.device)
    initial_K = 2 * math.pi * (index_K * GOLDEN).frac()
    away_K = torch.remainder(frequency_K.double() - initial_K + math.pi, 2 * math.pi) - math.pi
    return away_K / _log_rate(decay_K).exp()


def _coupling(parts: Sequence[Tensor]) -> Tensor:
    """Return how the blocks (J, J) of all heads differ from the identity, in units of RESONANCE."""
    identity = torch.eye(len(parts[0]), dtype=torch.float64, device=parts[0].device)
    return torch.cat([(block.double() - identity) / RESONANCE for block in parts])


TENSORS = """
token_embedding.weight token_emb.weight
position_embedding.weight pos_emb.weight
final_norm.* norm_f.*
blocks.{}.recurrence_norm.* layers.{}.norm1.*
blocks.{}.mlp_norm.* layers.{}.norm2.*
blocks.{}.recurrence.gate.* layers.{}.gate_proj.*
blocks.{}.mlp.up.* layers.{}.mlp.0.*
blocks.{}.mlp.down.* layers.{}.mlp.2.*
blocks.{}.recurrence.output.weight layers.{}.out_proj.weight
blocks.{}.recurrence.drive.weight drive layers.{}.in_proj.weight layers.{}.log_decay
blocks.{}.recurrence.drive.bias no_bias layers.{}.in_proj.weight
blocks.{}.recurrence.output.bias no_bias layers.{}.out_proj.weight
blocks.{}.recurrence.eigenvalues.log_rate log_rate layers.{}.log_decay
blocks.{}.recurrence.eigenvalues.detuning detuning layers.{}.log_decay layers.{}.frequency
blocks.{}.recurrence.coupling coupling"""
"""flatout multiplies the drive by a gain and states the coupling as a difference from the identity,
so both are divided out here. Biases that the FFT layer lacks are 0.
"""


def tensors(config: EigenstateConfig) -> list[TensorMap]:
    """Return the tensors of a model. The last row has a block for each head."""
    heads = (f" layers.{{}}.coupling_blocks.{head}" for head in range(config.num_heads))
    return tensors_of(
        TENSORS + "".join(heads),
        drive=(_drive, None),
        no_bias=(lambda parts: parts[0].new_zeros(len(parts[0])), None),
        coupling=(_coupling, None),
        log_rate=(lambda parts: _log_rate(parts[0]), None),
        detuning=(_detuning, None),
    )(config)


ARCHITECTURE = Architecture(
    not_exported="flatout only reads checkpoints of temporal-eigenstate-networks.",
    tensors=tensors,
    recognise=recognise,
)
