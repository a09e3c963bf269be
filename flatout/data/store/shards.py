"""Opens a dataset directory and reads its tokens in sequences.

A directory contains `manifest.json`, `tokenizer.json`, and for each shard `NNNNN.bin` (flat
tokens), `NNNNN.ends.bin` (int64, the ends of documents) and, with a loss mask, `NNNNN.mask.bin`
(uint8): the part of train, followed by that of val. Every 4 MiB block has a CRC-32, checked when
the block is first read from. File sizes are checked when a directory is opened and while its files
are read.

Letters in names: N sequences, T tokens of one sequence, W = T + 1 (its inputs and its last target).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.store.manifest import SPLITS, TOKENIZER, Manifest, SplitName, read_manifest
from flatout.data.store.order import shuffled
from flatout.data.store.sharded_array import RESTORE, ShardedArray, Span
from flatout.errors import DataError
from flatout.storage.files import Array, expanded
from flatout.storage.json_io import JsonObject
from flatout.storage.whole import problem_of

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

OPENING_TOKENS = 16
"""Tokens of `Dataset.opening`."""
MASK_READ = 2**20
"""Tokens whose mask is read at a time in a search for targets."""


class Dataset:
    """A prepared dataset directory, open for reading."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str) -> Dataset:
        """Open a directory. Check its manifest, tokenizer and file sizes without reading tokens.

        Raises: DataError when it is not a dataset, a file is missing or has the wrong size, or the
                tokenizer is not the one that made the tokens.
        """
        folder = expanded(path)
        dataset = cls(folder, read_manifest(folder))
        tokenizer = dataset.manifest.tokenizer.files
        for entry in dataset.manifest.files:
            problem = problem_of(folder / entry.name, entry, deep=entry in tokenizer)
            if problem is not None:
                raise DataError(problem, fix=RESTORE)
        return dataset

    @property
    def vocab_size(self) -> int:
        """Number of token ids. Every id is below it."""
        return self.manifest.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the directory, loaded on first use."""
        from flatout.data.tokenizers import load_tokenizer  # reading tokens does not need it

        return load_tokenizer(self.path / TOKENIZER, sha256=self.manifest.tokenizer.digest)

    @cached_property
    def _splits(self) -> dict[SplitName, Split]:
        return {name: Split(self.path, name, self.manifest) for name in SPLITS}

    @property
    def opening(self) -> str:
        """The text that a model's samples without a prompt continue. "" means a new document.

        It is the start of validation if training has a single document: a model that has seen
        nothing after an end-of-text token has not learned how a document starts.
        """
        val = self.split("val")
        if self.split("train").num_documents > 1 or not self.tokenizer.has_text:
            return ""
        ids = val.read_tokens(0, min(val.num_tokens, OPENING_TOKENS)).tolist()
        return self.tokenizer.decode(ids).strip("\ufffd")  # it may start inside a character

    def split(self, name: SplitName) -> Split:
        """Return `train` or `val`. A split without documents has no tokens."""
        return self._splits[name]


class Split:
    """One split's tokens as one long array, read in sequences.

    Sequence i covers the tokens i*T to i*T + T, inclusive: T inputs and, shifted by one, T targets.
    """

    def __init__(self, folder: Path, name: SplitName, manifest: Manifest) -> None:
        counts = manifest.splits[name]
        self.folder = folder
        self.name = name
        self.num_tokens = counts.tokens
        self.num_documents = counts.documents
        self.text_bytes = counts.text_bytes
        self.has_mask = manifest.is_masked
        self.dtype = np.dtype(manifest.dtype)
        parts = [(one, one.start(name), one.splits[name]) for one in manifest.shards]
        tokens = [Span(one.tokens, before.tokens, part.tokens) for one, before, part in parts]
        ends = [Span(one.ends, before.documents, part.documents) for one, before, part in parts]
        masks = [
            Span(shard.mask, *span[1:])
            for shard, span in zip(manifest.shards, tokens, strict=True)
            if shard.mask is not None
        ]
        self._tokens = ShardedArray(folder, tokens, self.dtype)
        self._masks = ShardedArray(folder, masks, np.uint8)
        self._ends = ShardedArray(folder, ends, np.int64)
        self._counts = [(part.tokens, part.documents) for _, _, part in parts]

    def num_sequences(self, seq_len: int) -> int:
        """Return the number of whole sequences of seq_len + 1 tokens."""
        return max(self.num_tokens - 1, 0) // seq_len

    def sequences_at(self, positions: Array, seq_len: int, *, seed: int) -> Array:
        """Return the index of the sequence at each position, permuted anew in each epoch.

        Shapes:  positions (N,), integers from 0; returns (N,).
        """
        return shuffled(positions, self.num_sequences(seq_len), seed=seed)

    def read_sequences(self, indices: Array, seq_len: int, out: Array) -> None:
        """Copy sequences into `out`, which has the shards' dtype.

        Shapes:  indices (N,), out (N, T + 1).
        Raises:  DataError with the file and the byte when a block fails its checksum.
        """
        self._tokens.read(indices.astype(np.int64) * seq_len, out)

    def read_mask(self, indices: Array, seq_len: int, out: Array) -> None:
        """Write True where a sequence's target counts: everywhere, in a split without a mask.

        Shapes:  indices (N,), out (N, T) bool.
        """
        if self.has_mask:
            self._masks.read(indices.astype(np.int64) * seq_len + 1, out)
        else:
            out[:] = True

    def sequences_with_targets(self, seq_len: int, most: int | None = None) -> Array:
        """Return the indices of the first `most` sequences with a target that counts.

        The incomplete sequence at the end counts too. Without a mask these are all sequences.
        Cost: reads the mask, 1 byte per token, until `most` are found.

        Shapes:  returns (N,).
        """
        count = -(-max(self.num_tokens - 1, 0) // seq_len)
        most = count if most is None else min(most, count)
        if not self.has_mask:
            return np.arange(most)
        found, rows = np.arange(0), max(MASK_READ // seq_len, 1)
        for first in range(0, count, rows):
            stop = min((first + rows) * seq_len + 1, self.num_tokens)
            mask = self.read_mask_range(first * seq_len + 1, stop)
            counts = np.logical_or.reduceat(mask, np.arange(0, len(mask), seq_len))
            found = np.concatenate([found, first + np.flatnonzero(counts)])
            if len(found) >= most:
                break
        return found[:most]

    def read_tokens(self, start: int, stop: int) -> Array:
        """Return a copy of the tokens [start, stop)."""
        return _read_range(self._tokens, start, stop, self.dtype)

    def read_mask_range(self, start: int, stop: int) -> Array:
        """Return the mask of the tokens [start, stop)."""
        return _read_range(self._masks, start, stop, np.dtype(np.bool_))

    def read_spans(self, starts: Array, lengths: Array, out: Array) -> None:
        """Copy lengths[n] tokens from starts[n] to the start of out[n], and pad the rest with 0.

        Shapes:  starts, lengths (N,), lengths at most W; out (N, W).
        """
        self._tokens.read_spans(starts, lengths, out)

    def read_mask_spans(self, starts: Array, lengths: Array, out: Array) -> None:
        """Copy the mask of lengths[n] tokens from starts[n] to out[n], and pad the rest with False.

        Shapes:  starts, lengths (N,), lengths at most W; out (N, W) bool.
        """
        self._masks.read_spans(starts, lengths, out)

    def read_document_ids(self, indices: Array, seq_len: int, out: Array) -> None:
        """Number the documents within each sequence's inputs, from 0 for the first.

        Shapes:  indices (N,), out (N, T) int32.
        """
        starts = indices.astype(np.int64) * seq_len
        ends = self.document_ends
        # A document's end (exclusive) is the first position of the next document: mark each with 1
        # and sum.
        first = np.searchsorted(ends, starts, side="right")
        counts = np.searchsorted(ends, starts + seq_len - 1, side="right") - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        out[:] = 0
        out[rows, ends[first[rows] + within] - starts[rows]] = 1
        np.cumsum(out, axis=1, out=out)

    def locate(self, index: int, seq_len: int) -> JsonObject:
        """Return where a sequence is stored: its index, and what `locate_tokens` returns."""
        start = index * seq_len
        return {"sequence": index} | self.locate_tokens(start, start + seq_len + 1)

    def locate_tokens(self, start: int, stop: int) -> JsonObject:
        """Return where the tokens [start, stop) are stored.

        Returns: `dataset`; `shard`, the file of the first token; `token`, its index in that file;
                 `documents`, the indices of the first and the last document in the split.
        """
        shard, token = self._tokens.locate(start)
        ends = np.array([start, stop - 1])
        documents = np.searchsorted(self.document_ends, ends, side="right").tolist()
        return {
            "dataset": str(self.folder),
            "shard": shard,
            "token": token,
            "documents": documents,
        }

    @cached_property
    def document_ends(self) -> Array:
        """The position after each document's last token, ascending."""
        tokens, documents = np.array(self._counts, np.int64).reshape(-1, 2).T
        ends = _read_range(self._ends, 0, self.num_documents, np.dtype(np.int64))
        return ends + np.repeat(np.cumsum(tokens) - tokens, documents)


def _read_range(array: ShardedArray, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
    out = np.empty(stop - start, dtype)
    array.read(np.array([start]), out[np.newaxis])
    return out
