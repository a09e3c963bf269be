"""What a step reads: rows of tokens in an order that can be sought. numpy alone; loader.py makes
tensors of it.

Letters in names: A micro-batches, B rows of one, T tokens of one row, W = T + 1, N = A * B rows of
a rank's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from flatout.data.store.shards import SplitReader
from flatout.errors import DataError
from flatout.progress import SILENT, Progress

Array = np.ndarray[Any, np.dtype[Any]]

WORKED_OUT = 4096
"""Windows whose place in the order is worked out at once: a few cost nearly what a thousand do."""


class SequenceReader(Protocol):
    """How the windows of a step are read."""

    def read(self, split: SplitReader, indices: Array, out: Array) -> None:
        """Write window indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, W), dtype of the split.
        """


@runtime_checkable
class PrimedReader(SequenceReader, Protocol):
    """A reader that needs something of the windows before they are read, so that getting it is not
    part of a step.
    """

    def prime(self, split: SplitReader, indices: Array, seq_len: int) -> bool:
        """Get ready to read windows `indices`; return whether there is room for more.

        Shapes:  indices (N,).
        """


class ShardReader:
    """Windows copied straight from the shards."""

    def read(self, split: SplitReader, indices: Array, out: Array) -> None:
        """Write window indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, W), dtype of the split.
        """
        split.read_sequences(indices, out.shape[1] - 1, out)


@dataclass(frozen=True)
class BatchPlan:
    """What a feed reads: the shape of a step, this rank's place in it, and the seed of the order."""

    seq_len: int
    rows_per_device: int
    accumulate: int
    rank: int
    world_size: int
    seed: int
    document_mask: bool
    prefetch: int
    device: str
    most_documents: Callable[[int, int], int] | None = None
    """(rows, tokens of a row) -> the most documents that attention takes in a micro-batch; None is
    any number.
    """

    @property
    def sequences_per_step(self) -> int:
        """Windows of one optimiser step over all ranks."""
        return self.accumulate * self.world_size * self.rows_per_device

    def positions(self, start: int) -> Array:
        """Return the positions of this rank's windows in the step that begins at `start`.

        Shapes:  returns (A * B,).
        """
        return start + self.places(self.rows_per_device)

    def places(self, rows: int) -> Array:
        """Return the places of this rank's rows among all rows of a step that has `rows` in a
        micro-batch.

        Row b of micro-batch a on rank r has the place (a * world_size + r) * rows + b: whatever the
        number of ranks, the step as a whole reads the same rows.

        Shapes:  returns (A * B,).
        """
        micro = np.arange(self.accumulate)[:, np.newaxis] * self.world_size + self.rank
        return (micro * rows + np.arange(rows)).reshape(-1)


class Shape(NamedTuple):
    """The shape of a step's micro-batches."""

    rows: int
    """Rows of one (B)."""
    seq_len: int
    """Tokens of a row (T)."""


class StepRead(NamedTuple):
    """What was read for a step, over all ranks; every rank says the same."""

    position: int
    """Where the next step begins."""
    tokens: int
    """Targets that are text; padding does not count."""
    samples: int
    """Rows with any."""


class StepReader(Protocol):
    """What a feed asks for the rows of a step."""

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
        """Targets that they read; padding does not count."""

    def shape_at(self, position: int) -> Shape:
        """Return the shape of the step that begins at `position`."""

    def read(
        self, position: int, sequences_NW: Array, mask_NT: Array | None, doc_ids_NT: Array | None
    ) -> StepRead:
        """Write this rank's rows of the step that begins at `position`, and return what all ranks
        read.

        Shapes:  sequences_NW (A * B, T + 1); mask_NT, doc_ids_NT (A * B, T), None where there are
                 none.
        """

    def prime(self, position: int, steps: int, progress: Progress) -> None:
        """Get ready for the rows of the next `steps` steps, as far as the reading needs it."""


class SequenceSteps:
    """Steps of windows, all of one shape, cut out of the packed line. A position counts windows
    over all epochs and ranks.
    """

    def __init__(self, split: SplitReader, plan: BatchPlan, windows: SequenceReader) -> None:
        if not split.num_sequences(plan.seq_len):
            raise too_short(split, plan.seq_len)
        self.plan = plan
        self.shapes = (Shape(plan.rows_per_device, plan.seq_len),)
        self.dtype, self.has_mask, self.has_document_ids = (
            split.dtype,
            split.has_mask,
            plan.document_mask,
        )
        self._split, self._windows = split, windows
        self._first = 0
        self._ahead = np.empty((0, plan.accumulate * plan.rows_per_device), np.int64)
        """The windows of the steps from position `_first` on."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read every window once: not a whole number, an epoch begins inside a step."""
        return self._split.num_sequences(self.plan.seq_len) / self.plan.sequences_per_step

    @property
    def tokens_per_epoch(self) -> int:
        """Targets of all windows."""
        return self._split.num_sequences(self.plan.seq_len) * self.plan.seq_len

    def shape_at(self, position: int) -> Shape:
        """Return the one shape there is."""
        return self.shapes[0]

    def read(
        self, position: int, sequences_NW: Array, mask_NT: Array | None, doc_ids_NT: Array | None
    ) -> StepRead:
        """Write this rank's windows of the step that begins at `position`, and return what all
        ranks read.

        Shapes:  sequences_NW (A * B, T + 1); mask_NT, doc_ids_NT (A * B, T), None where there are
                 none.
        """
        indices, seq_len = self._indices(position), self.plan.seq_len
        self._windows.read(self._split, indices, sequences_NW)
        if mask_NT is not None:
            self._split.read_mask(indices, seq_len, mask_NT)
        if doc_ids_NT is not None:
            self._split.read_document_ids(indices, seq_len, doc_ids_NT)
        windows = self.plan.sequences_per_step
        return StepRead(position + windows, windows * seq_len, windows)

    def prime(self, position: int, steps: int, progress: Progress = SILENT) -> None:
        """Let a reader that needs it get ready for the windows of the next `steps` steps, as many
        as it keeps.
        """
        if not isinstance(self._windows, PrimedReader):
            return
        plan = self.plan
        with progress.task("Taking the text of the windows", unit="windows") as task:
            for _ in range(steps):
                indices = self._split.sequences_at(
                    plan.positions(position), plan.seq_len, seed=plan.seed
                )
                more = self._windows.prime(self._split, indices, plan.seq_len)
                task.advance(len(indices))
                if not more:
                    break
                position += plan.sequences_per_step

    def _indices(self, position: int) -> Array:
        """Return the windows of one step, worked out for many steps at a time."""
        step, rest = divmod(position - self._first, self.plan.sequences_per_step)
        if rest or not 0 <= step < len(self._ahead):
            own = self.plan.positions(position)
            starts = np.arange(max(WORKED_OUT // len(own), 1)) * self.plan.sequences_per_step
            positions = (starts[:, np.newaxis] + own).reshape(-1)
            self._ahead = self._split.sequences_at(
                positions, self.plan.seq_len, seed=self.plan.seed
            ).reshape(-1, len(own))
            self._first, step = position, 0
        indices: Array = self._ahead[step]
        return indices


def check_documents(doc_ids_BT: Array, most_documents: Callable[[int, int], int] | None) -> None:
    """Check that a micro-batch has no more documents than attention takes: here the ids are on the
    host, and nothing waits for the device.

    Shapes:  doc_ids_BT (B, T), numbered from 0 in each row.
    Cost:    reads B numbers.
    Raises:  DataError.
    """
    if most_documents is None:
        return
    rows, seq_len = doc_ids_BT.shape
    documents, room = (
        int(doc_ids_BT[:, -1].sum(dtype=np.int64)) + rows,
        most_documents(rows, seq_len),
    )
    if documents > room:
        raise DataError(
            f"A micro-batch of {rows} x {seq_len} tokens has {documents:,} documents, and the attention of this run takes {room:,}.",
            fix="Set speedups=auto,-varlen-attention,+flex-attention, which takes any number; the run continues from its last checkpoint.",
        )


def too_short(split: SplitReader, seq_len: int) -> DataError:
    """Return the error for a split without one window."""
    return DataError(
        f"The {split.name} split holds {split.num_tokens} tokens; one window of data.seq_len={seq_len} needs {seq_len + 1}.",
        fix=f"Set data.seq_len={split.num_tokens - 1} or less, or prepare more text."
        if split.num_tokens > 1
        else f"Prepare more text: the {split.name} split is empty.",
    )
