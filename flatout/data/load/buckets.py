"""Read one document per row, with short documents in short rows.

For data that must not be packed. A document longer than data.seq_len is split into rows of that
many inputs. Every target of the split is read once per epoch.

`BucketedSteps` pads rows to one of a few lengths: seq_len and its halves. All rows of a step have
the same length, and rows of half the length come twice as many to a step, so every step has the
same number of positions. Rows left over at the end of an epoch join those of the next length. Only
the last step of the longest may contain empty rows. An epoch's batch plan (which rows form which
step, in what order) is a function of (seed, epoch, lengths), evaluated on demand. A position is an
index into the plans of all epochs.

`MixedSteps` draws the rows of a step from all lengths, and divides them into micro-batches of a
limited number of tokens, each padded to one of eight lengths for each power of two. Any division of
a step has the same rows.

Letters in names: N rows of a rank's step, T tokens of a row, W = T + 1.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np

from flatout.data.load.batches import BatchPlan, Shape, StepRead, StepReader
from flatout.data.store.order import shuffled
from flatout.data.store.shards import Split
from flatout.errors import DataError
from flatout.storage.files import Array
from flatout.storage.json_io import JsonObject

MOST_LENGTHS = 4
SHORTEST = 16
"""Length of the shortest rows: shorter ones would not fill a device."""


class _Bucket(NamedTuple):
    """The rows of one length."""

    shape: Shape
    first: int
    """Index of its first row among all rows, sorted by bucket."""
    own: int
    """Rows of this length."""
    pool: int
    """Rows including those that the next shorter bucket leaves over in each epoch."""
    rows_per_step: int
    """Rows per step over all ranks and micro-batches."""
    num_steps: int
    """Steps per epoch."""
    first_step: int
    """Index of its first step among all steps of an epoch, before they are shuffled."""


def document_steps(split: Split, plan: BatchPlan, _reader: object) -> StepReader:
    """Return the reader of steps whose rows are documents."""
    return MixedSteps(split, plan) if plan.by_tokens else BucketedSteps(split, plan)


class _DocumentSteps:
    """The rows of a split, each of one document.

    Memory: 12 bytes per row.
    """

    shapes: tuple[Shape, ...]
    _step_rows: Any
    """Returns the rows of the step at a position over all ranks, without empty ones."""
    _share: Any
    """Returns this rank's rows of these, the position of the next step, and shapes that differ."""
    has_mask = True
    has_document_ids = False
    """A row is one document, so attention needs no document mask."""

    def __init__(self, split: Split, plan: BatchPlan) -> None:
        starts, sizes = rows_of(split.document_ends, plan.seq_len)
        if not len(starts):
            raise DataError(
                f"The {split.name} split has no document of two or more tokens.",
                fix="Prepare more text.",
            )
        self.plan, self.dtype = plan, split.dtype
        self._split, self._starts, self._sizes = split, starts, sizes.astype(np.int32)
        self.tokens_per_epoch = int(sizes.sum())
        """Number of targets in all documents."""

    def data_at(self, position: int) -> list[JsonObject]:
        """Return where each row of the step at `position` is stored, for all ranks in order."""
        rows = self._step_rows(position)
        spans = zip(self._starts[rows].tolist(), self._sizes[rows].tolist(), strict=True)
        return [self._split.locate_tokens(start, start + size + 1) for start, size in spans]

    def read(
        self, position: int, sequences_NW: Array, mask_NT: Any, doc_ids_NT: Array | None
    ) -> StepRead:
        """Write this rank's rows of the step at `position`, and return what all ranks read.

        Tokens after the end of a document are 0, and masked. Rows without a document are empty.

        Shapes:  sequences_NW (N, T + 1); mask_NT (N, T); doc_ids_NT None.
        """
        rows = self._step_rows(position)
        own, following, shapes = self._share(rows, position)
        starts, sizes = np.zeros((2, len(sequences_NW)), np.int64)
        starts[: len(own)], sizes[: len(own)] = self._starts[own], self._sizes[own]
        self._split.read_spans(starts, np.where(sizes, sizes + 1, 0), sequences_NW)
        if self._split.has_mask:
            self._split.read_mask_spans(starts + 1, sizes, mask_NT)
        else:
            mask_NT[:] = np.arange(mask_NT.shape[1]) < sizes[:, np.newaxis]
        tokens = int(self._sizes[rows].sum())
        return StepRead(following, tokens, len(rows), position, shapes)


class MixedSteps(_DocumentSteps):
    """Steps of documents of all lengths, one per row. A position counts rows over epochs.

    Each rank has every n-th row of a step by length, so that all ranks have micro-batches of the
    same shape.
    """

    def __init__(self, split: Split, plan: BatchPlan) -> None:
        super().__init__(split, plan)
        self.shapes = (Shape(plan.rows_per_device, plan.seq_len),)
        self.steps_per_epoch = len(self._sizes) / plan.sequences_per_step

    def shape_at(self, position: int) -> Shape:
        """Return the shape of a micro-batch of the longest rows. No other has more tokens."""
        return self.shapes[0]

    def _share(self, rows: Array, position: int) -> tuple[Array, int, tuple[Shape, ...]]:
        plan, shapes = self.plan, list[Shape]()
        longest = self._sizes[rows[:: plan.dp_size]].tolist()
        while longest:
            unit = 1 << max(longest[0].bit_length() - 4, 0)  # a CPU keeps memory for each shape
            seq_len = min(-(-longest[0] // unit) * unit, plan.seq_len)
            most = plan.rows_per_device * plan.seq_len // seq_len
            shapes.append(Shape(min(most, len(longest)), seq_len))
            del longest[:most]
        return rows[plan.dp_rank :: plan.dp_size], position + len(rows), tuple(shapes)

    def _step_rows(self, position: int) -> Array:
        """Return the rows of the step at `position` over all ranks, the longest first.

        Shapes:  returns (rows,).
        """
        positions = position + np.arange(self.plan.sequences_per_step)
        rows = shuffled(positions, len(self._sizes), seed=self.plan.seed)
        return rows[np.argsort(-self._sizes[rows], kind="stable")]


class BucketedSteps(_DocumentSteps):
    """Steps of documents in a few fixed shapes. A position counts steps over epochs."""

    def __init__(self, split: Split, plan: BatchPlan) -> None:
        super().__init__(split, plan)
        lengths = row_lengths(plan.seq_len)
        of_bucket = np.searchsorted(lengths, self._sizes)
        by_bucket = np.argsort(of_bucket, kind="stable")
        self._starts, self._sizes = self._starts[by_bucket], self._sizes[by_bucket]
        self._buckets: list[_Bucket] = []
        first = carried = first_step = 0
        counts = np.bincount(of_bucket, minlength=len(lengths)).tolist()
        for seq_len, own in zip(lengths, counts, strict=True):
            factor = plan.seq_len // seq_len
            shape = Shape(plan.rows_per_device * factor, seq_len)
            per_step = plan.sequences_per_step * factor
            pool = own + carried
            num_steps, carried = divmod(pool, per_step)
            num_steps += seq_len == plan.seq_len and carried > 0
            self._buckets.append(_Bucket(shape, first, own, pool, per_step, num_steps, first_step))
            first += own
            first_step += num_steps
        self.steps_per_epoch = self.num_steps = first_step
        self.shapes = tuple(bucket.shape for bucket in reversed(self._buckets))

    def shape_at(self, position: int) -> Shape:
        """Return the shape of the step at `position`."""
        return self._buckets[self._step(position)[0]].shape

    def _share(self, rows: Array, position: int) -> tuple[Array, int, tuple[Shape, ...]]:
        indices = self.plan.row_indices(self.shape_at(position).rows)
        return rows[indices[indices < len(rows)]], position + 1, ()

    def _step(self, position: int) -> tuple[int, int]:
        """Return the bucket of the step at `position`, and the index of the step within it."""
        step = int(shuffled(np.array([position]), self.num_steps, seed=self._seed(0))[0])
        number = bisect_right(self._buckets, step, key=lambda bucket: bucket.first_step) - 1
        return number, step - self._buckets[number].first_step

    def _step_rows(self, position: int) -> Array:
        """Return the rows of the step at `position` over all ranks, without empty ones.

        Shapes:  returns (rows,).
        """
        number, group = self._step(position)
        bucket = self._buckets[number]
        first = group * bucket.rows_per_step
        items = np.arange(first, min(first + bucket.rows_per_step, bucket.pool))
        return self._rows_at(number, position // self.num_steps, items)

    def _rows_at(self, number: int, epoch: int, items: Array) -> Array:
        """Return the rows at indices `items` of a bucket's order in an epoch.

        Rows left over by the shorter bucket come after its own.

        Shapes:  items (rows,), below the bucket's pool; returns (rows,).
        """
        bucket = self._buckets[number]
        drawn = shuffled(epoch * bucket.pool + items, bucket.pool, seed=self._seed(number + 1))
        rows = bucket.first + drawn
        carried = np.flatnonzero(drawn >= bucket.own)
        if len(carried):
            shorter = self._buckets[number - 1]
            left_over = shorter.num_steps * shorter.rows_per_step + drawn[carried] - bucket.own
            rows[carried] = self._rows_at(number - 1, epoch, left_over)
        return rows

    def _seed(self, order: int) -> int:
        """Return the seed of an order: 0 is that of steps, n that of the rows of bucket n - 1."""
        return self.plan.seed * (MOST_LENGTHS + 1) + order


def rows_of(document_ends: Array, seq_len: int) -> tuple[Array, Array]:
    """Return where each row starts and how many inputs it has, at most seq_len.

    The inputs of a document are its tokens but the last.

    Shapes:  document_ends (documents,), ascending; returns (rows,) and (rows,).
    """
    begins = np.concatenate([[0], document_ends[:-1]]).astype(np.int64)
    inputs = document_ends - begins - 1
    counts = -(-inputs // seq_len)
    within = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    return np.repeat(begins, counts) + within, np.minimum(
        np.repeat(inputs, counts) - within, seq_len
    )


def row_lengths(seq_len: int) -> list[int]:
    """Return the row lengths, ascending: seq_len and its whole halves down to SHORTEST."""
    halves = (seq_len >> n for n in range(MOST_LENGTHS) if not seq_len % (1 << n))
    return sorted(each for each in halves if each >= min(SHORTEST, seq_len))
