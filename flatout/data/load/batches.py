"""Reads each step's rows in a seekable order as numpy arrays. loader.py makes tensors of them.

Letters in names: A micro-batches, B rows of one, T tokens of one row, W = T + 1, N = A * B rows of
a rank's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from flatout.data.store.mix import SplitReader
from flatout.errors import DataError
from flatout.storage.files import Array
from flatout.storage.json_io import JsonObject

LOOKAHEAD = 8192
"""Positions of the order computed at once: a few cost almost as much as a thousand."""


class SequenceReader(Protocol):
    """Reads the sequences of a step."""

    def read(self, split: SplitReader, indices: Array, seq_len: int, out: Array) -> None:
        """Write sequence indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, T + 1), dtype of the split.
        """


class ShardReader:
    """Copies sequences straight from the shards."""

    def read(self, split: SplitReader, indices: Array, seq_len: int, out: Array) -> None:
        """Write sequence indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, T + 1), dtype of the split.
        """
        split.read_sequences(indices, seq_len, out)


@dataclass(frozen=True)
class BatchPlan:
    """The shape of a step, this rank's share of it, and the seed of the order."""

    seq_len: int
    rows_per_device: int
    accumulate: int
    dp_rank: int = 0
    """The position of this rank's rows among those of `dp_size` ranks, or groups of them."""
    dp_size: int = 1
    seed: int = 0
    document_mask: bool = False
    prefetch: int = 0
    device: str = "cpu"
    by_tokens: bool = False
    """Whether the rows of a micro-batch depend on their length."""

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.accumulate * self.dp_size * self.rows_per_device

    def row_indices(self, rows: int) -> Array:
        """Return the indices of this rank's rows in a step with `rows` per micro-batch.

        Row b of micro-batch a on rank r has the index (a * dp_size + r) * rows + b: the step as a
        whole reads the same rows for any number of ranks.

        Shapes:  returns (A * B,).
        """
        micro = np.arange(self.accumulate)[:, np.newaxis] * self.dp_size + self.dp_rank
        return (micro * rows + np.arange(rows)).reshape(-1)


class Shape(NamedTuple):
    """The shape of a step's micro-batches."""

    rows: int
    """Rows of a micro-batch (B)."""
    seq_len: int
    """Tokens of a row (T)."""


class StepRead(NamedTuple):
    """Totals of one step over all ranks, the same on every rank."""

    position: int
    """Position of the next step."""
    tokens: int
    """Targets, without padding."""
    samples: int
    """Rows with at least one target."""
    start: int
    """Position of the step that was read."""
    shapes: tuple[Shape, ...] = ()
    """The shapes of each rank's micro-batches, if they differ. They divide its rows in order."""


class StepReader(Protocol):
    """Reads the rows of a step for a data loader."""

    plan: BatchPlan
    shapes: tuple[Shape, ...]
    """Every shape that a step can have."""
    dtype: np.dtype[Any]
    has_mask: bool
    has_document_ids: bool

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read the split once."""

    @property
    def tokens_per_epoch(self) -> int:
        """Targets in those steps, without padding."""

    def shape_at(self, position: int) -> Shape:
        """Return the shape of the step at `position`."""

    def read(
        self, position: int, sequences_NW: Array, mask_NT: Array | None, doc_ids_NT: Array | None
    ) -> StepRead:
        """Write this rank's rows of the step at `position`, and return the totals of all ranks.

        Shapes:  sequences_NW (A * B, T + 1); mask_NT, doc_ids_NT (A * B, T) or None.
        """

    def data_at(self, position: int) -> list[JsonObject]:
        """Return where each row of the step at `position` is stored, for all ranks in order."""


class SequenceSteps:
    """Steps of one shape, read as consecutive sequences of the packed tokens.

    A position counts sequences over all epochs and ranks.
    """

    def __init__(self, split: SplitReader, plan: BatchPlan, reader: SequenceReader) -> None:
        if not split.num_sequences(plan.seq_len):
            raise too_short(split, plan.seq_len)
        self.plan = plan
        self.shapes = (Shape(plan.rows_per_device, plan.seq_len),)
        self.dtype, self.has_mask = split.dtype, split.has_mask
        self.has_document_ids = plan.document_mask
        self._split, self._reader = split, reader
        self._first = 0
        self._ahead = np.empty((0, plan.accumulate * plan.rows_per_device), np.int64)
        """The sequences of the steps that start at position `_first`."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read every sequence once. Fractional, because an epoch can end mid-step."""
        return self._split.num_sequences(self.plan.seq_len) / self.plan.sequences_per_step

    @property
    def tokens_per_epoch(self) -> int:
        """Targets of all sequences."""
        return self._split.num_sequences(self.plan.seq_len) * self.plan.seq_len

    def shape_at(self, position: int) -> Shape:
        """Return the only shape."""
        return self.shapes[0]

    def read(
        self, position: int, sequences_NW: Array, mask_NT: Array | None, doc_ids_NT: Array | None
    ) -> StepRead:
        """Write this rank's rows of the step at `position`, and return the totals of all ranks.

        Shapes:  sequences_NW (A * B, T + 1); mask_NT, doc_ids_NT (A * B, T) or None.
        """
        indices, seq_len = self._indices(position), self.plan.seq_len
        self._reader.read(self._split, indices, seq_len, sequences_NW)
        if mask_NT is not None:
            self._split.read_mask(indices, seq_len, mask_NT)
        if doc_ids_NT is not None:
            self._split.read_document_ids(indices, seq_len, doc_ids_NT)
        sequences = self.plan.sequences_per_step
        return StepRead(position + sequences, sequences * seq_len, sequences, position)

    def data_at(self, position: int) -> list[JsonObject]:
        """Return where each row of the step at `position` is stored, for all ranks in order."""
        positions = np.arange(position, position + self.plan.sequences_per_step)
        indices = self._split.sequences_at(positions, self.plan.seq_len, seed=self.plan.seed)
        return [self._split.locate(index, self.plan.seq_len) for index in indices.tolist()]

    def _indices(self, position: int) -> Array:
        """Return the sequences of one step, computed for many steps at a time."""
        step, rest = divmod(position - self._first, self.plan.sequences_per_step)
        if rest or not 0 <= step < len(self._ahead):
            own = position + self.plan.row_indices(self.plan.rows_per_device)
            starts = np.arange(max(LOOKAHEAD // len(own), 1)) * self.plan.sequences_per_step
            positions = (starts[:, np.newaxis] + own).reshape(-1)
            self._ahead = self._split.sequences_at(
                positions, self.plan.seq_len, seed=self.plan.seed
            ).reshape(-1, len(own))
            self._first, step = position, 0
        indices: Array = self._ahead[step]
        return indices


def too_short(split: SplitReader, seq_len: int) -> DataError:
    """Return the error for a split without a single sequence."""
    return DataError(
        f"The {split.name} split has {split.num_tokens} tokens. "
        f"One sequence of data.seq_len={seq_len} needs {seq_len + 1}.",
        fix=f"Set data.seq_len={split.num_tokens - 1} or less, or prepare more text."
        if split.num_tokens > 1
        else f"Prepare more text: the {split.name} split is empty.",
    )
