"""Delivers the rows of each step as tensors on the device, on demand or ahead of time.

Letters in names: A micro-batches, B rows of one, T tokens of one row, W = T + 1, N = A * B rows of
a rank's step.
"""

# ruff: noqa: N815  fields carry shape suffixes in capitals, as all tensors do

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatout.data.load.batches import SequenceReader, Shape, StepReader
from flatout.data.store.shards import Split
from flatout.storage.files import Array
from flatout.storage.json_io import JsonObject

X = TypeVar("X")
Y = TypeVar("Y")

IGNORED = -1
"""The target of a position that does not count."""


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one model call."""

    tokens_BT: Tensor
    """int64, contiguous."""
    targets_BT: Tensor
    """int64, contiguous: the next token, -1 where it does not count."""
    doc_ids_BT: Tensor | None
    """int32: the index of each position's document in its sequence. None without a document mask.
    """


@dataclass
class StepBatch:
    """One rank's share of one optimizer step, on the device.

    The data loader does not reuse the tensors: they belong to the caller.
    """

    sequences_ABW: Tensor
    """uint16, or int32 for a vocabulary above 65,536: a quarter or half of the bytes of int64."""
    mask_ABT: Tensor | None
    """bool, True where the target counts. None when all do."""
    doc_ids_ABT: Tensor | None
    """int32. None without a document mask."""
    seq_len: int
    """Input tokens of a row (T)."""
    position: int
    """Position of all ranks after this batch."""
    tokens: int
    """Targets of all ranks in this step, without padding."""
    samples: int
    """Rows of all ranks in this step, without rows that are only padding."""
    start: int
    """Position of all ranks before this batch."""
    wait_ms: float
    """How long the caller waited for the batch."""
    shapes: tuple[Shape, ...] = ()
    """The shapes of the micro-batches, if they differ. They divide the rows in order."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step (A, or as many as `shapes`)."""
        return len(self.shapes or self.sequences_ABW)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the step's micro-batches. Tokens become int64 here, on the device."""
        number, each_rows, _ = self.sequences_ABW.shape
        first = 0
        for rows, seq_len in self.shapes or [(each_rows, self.seq_len)] * number:
            last = first + rows
            mask_BT, doc_ids_BT = (
                None if each is None else each.flatten(0, 1)[first:last, :seq_len]
                for each in (self.mask_ABT, self.doc_ids_ABT)
            )
            sequences_BW = self.sequences_ABW.flatten(0, 1)[first:last, : seq_len + 1]
            yield _micro_batch(sequences_BW, mask_BT, doc_ids_BT)
            first = last


def _micro_batch(
    sequences_BW: Tensor, mask_BT: Tensor | None, doc_ids_BT: Tensor | None
) -> MicroBatch:
    targets_BT = _to_int64(sequences_BW[:, 1:])
    if mask_BT is not None:
        targets_BT.masked_fill_(~mask_BT, IGNORED)
    return MicroBatch(_to_int64(sequences_BW[:, :-1]), targets_BT, doc_ids_BT)


def _to_int64(tokens_BT: Tensor) -> Tensor:
    """Return int64 tokens with the strides of a fresh tensor.

    For a single row torch would keep the strides of the slice, which would trigger a recompilation.
    """
    return tokens_BT.to(torch.int64, memory_format=torch.contiguous_format)


def _apply(function: Callable[[X], Y], value: X | None) -> Y | None:
    return None if value is None else function(value)


class _Buffer:
    """Reusable host memory for one step, pinned when a GPU copies from it asynchronously."""

    def __init__(self, steps: StepReader, *, pinned: bool) -> None:
        plan = steps.plan
        self._steps, self._accumulate = steps, plan.accumulate
        self._device = torch.device(plan.device)
        tokens = plan.accumulate * max(rows * seq_len for rows, seq_len in steps.shapes)
        lasts = plan.accumulate * max(rows for rows, _ in steps.shapes)
        stored = torch.uint16 if steps.dtype.itemsize == 2 else torch.int32
        self._sequences = torch.empty(tokens + lasts, dtype=stored, pin_memory=pinned)
        self._mask = (
            torch.empty(tokens, dtype=torch.bool, pin_memory=pinned) if steps.has_mask else None
        )
        self._doc_ids = (
            torch.empty(tokens, dtype=torch.int32, pin_memory=pinned)
            if steps.has_document_ids
            else None
        )
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def read(self, position: int) -> StepBatch:
        """Read this rank's rows of the step at `position`, and return a copy on the device.

        On a GPU the copy is queued on the current stream, and the buffer is reused only after it
        finishes.
        """
        if self._copied is not None:
            self._copied.synchronize()
        rows, seq_len = self._steps.shape_at(position)
        sequences_NW = self._rows(self._sequences, rows, seq_len + 1)
        mask_NT, doc_ids_NT = (
            _apply(lambda flat: self._rows(flat, rows, seq_len), flat)
            for flat in (self._mask, self._doc_ids)
        )
        mask, doc_ids = _apply(Tensor.numpy, mask_NT), _apply(Tensor.numpy, doc_ids_NT)
        read = self._steps.read(
            position, sequences_NW.numpy().view(self._steps.dtype), mask, doc_ids
        )
        batch = StepBatch(
            self._copy(sequences_NW),
            _apply(self._copy, mask_NT),
            _apply(self._copy, doc_ids_NT),
            seq_len,
            **read._asdict(),
            wait_ms=0.0,
        )
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return batch

    def _rows(self, flat: Tensor, rows: int, width: int) -> Tensor:
        if self._device.type == "cpu":  # the caller's own memory, without a copy
            return torch.empty(self._accumulate * rows, width, dtype=flat.dtype)
        return flat[: self._accumulate * rows * width].view(-1, width)

    def _copy(self, host: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return host.view(self._accumulate, -1, host.shape[1])
        return host.to(self._device, non_blocking=self._copied is not None).view(
            self._accumulate, -1, host.shape[1]
        )


class _Loader:
    """An endless iterator with a position: the base of both data loaders."""

    def __init__(self, steps: StepReader) -> None:
        self.position: int = 0
        """Position of the next step, in units of the step reader, over all epochs and ranks."""
        self._steps = steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatch:
        began = time.perf_counter()
        batch = self._next_batch()
        self.position = batch.position
        batch.wait_ms = (time.perf_counter() - began) * 1e3
        return batch

    def _next_batch(self) -> StepBatch:
        raise NotImplementedError

    def seek(self, position: int) -> None:
        """Continue at a different position. Steps read ahead are dropped."""
        if position != self.position:
            self.close()
            self.position = position

    def data_at(self, position: int) -> list[JsonObject]:
        """Return where each row of the step at `position` is stored, for all ranks in order."""
        return self._steps.data_at(position)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read the split once, counting all datasets of a mix."""
        return self._steps.steps_per_epoch

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape that a micro-batch can have, without repeats."""
        return tuple(dict.fromkeys(self._steps.shapes))

    def close(self) -> None:
        """Release the data loader's resources; reading again reopens it."""


class DirectLoader(_Loader):
    """Reads each step on demand, in the caller's thread."""

    def __init__(self, steps: StepReader) -> None:
        super().__init__(steps)
        self._buffer = _Buffer(steps, pinned=False)

    def _next_batch(self) -> StepBatch:
        return self._buffer.read(self.position)


class PrefetchLoader(_Loader):
    """Reads the next `prefetch` steps in a background thread.

    On a GPU, copies run on a separate stream from two pinned buffers. The thread starts with the
    first requested step. An error in it is raised at the step where it occurred.
    """

    def __init__(self, steps: StepReader) -> None:
        super().__init__(steps)
        self._ahead: _ReadAhead | None = None

    def _next_batch(self) -> StepBatch:
        if self._ahead is None:
            self._ahead = _ReadAhead(self._steps, self.position)
            # Stops the thread of a data loader that is dropped without close().
            self._stop = weakref.finalize(self, self._ahead.stop)
        try:
            return self._ahead.take()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the background thread. Reading again starts a new one at the same position."""
        if self._ahead is not None:
            self._stop()
            self._ahead = None


class _ReadAhead:
    """A background thread that reads steps in order from a position, until it is stopped."""

    def __init__(self, steps: StepReader, position: int) -> None:
        self._device = torch.device(steps.plan.device)
        self._room = threading.Semaphore(steps.plan.prefetch)
        self._ready: queue.SimpleQueue[
            tuple[StepBatch, torch.cuda.Event | None] | BaseException
        ] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._read, args=(steps, position), name="flatout-loader", daemon=True
        )
        self._thread.start()

    def _read(self, steps: StepReader, position: int) -> None:
        try:
            on_gpu = self._device.type == "cuda"
            stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
            buffers = itertools.cycle(
                [_Buffer(steps, pinned=on_gpu) for _ in range(2 if on_gpu else 1)]
            )
            with torch.cuda.stream(stream) if stream else nullcontext():
                while self._room.acquire() and not self._stopping.is_set():
                    batch = next(buffers).read(position)
                    position = batch.position
                    self._ready.put((batch, stream.record_event() if stream else None))
        except BaseException as error:  # raised in the caller
            self._ready.put(error)

    def take(self) -> StepBatch:
        """Return the next step, or raise the thread's error. Only the stream waits for the copy."""
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            try:
                raise ready
            finally:
                del ready  # breaks the reference cycle between the error and this frame
        self._room.release()
        batch, copied = ready
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in (batch.sequences_ABW, batch.mask_ABT, batch.doc_ids_ABT):
                if tensor is not None:
                    # Allocated on another stream: its memory must not be reused before this stream
                    # has finished with it.
                    tensor.record_stream(stream)
        return batch

    def stop(self) -> None:
        """Stop the thread and wait for it. A second call does nothing."""
        self._stopping.set()
        self._room.release()
        # Garbage collection may finalise a dropped loader in the thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join()


def evaluation_batches(
    split: Split,
    seq_len: int,
    rows: int,
    *,
    device: str,
    reader: SequenceReader,
    dp_rank: int = 0,
    dp_size: int = 1,
    max_tokens: int | None = None,
    document_mask: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a split, in order: every token except the first is a target once.

    All batches have the same shape and all ranks get the same number of them: the end of the last
    sequence, and missing sequences, are padded with token 0 and target -1. Sequences without a
    target that counts are left out. `max_tokens` limits the number of targets, masked ones
    included. Of a split with a mask, it takes whole sequences. A split of fewer than two tokens
    yields nothing.

    Shapes:  yields tokens_BT, targets_BT (rows, seq_len).
    """
    most = None if max_tokens is None else -(-max_tokens // seq_len)
    chosen = split.sequences_with_targets(seq_len, most)
    end = split.num_tokens
    if max_tokens is not None and not split.has_mask:
        end = min(end, max_tokens + 1)
    for first in range(dp_rank * rows, len(chosen) + dp_rank * rows, rows * dp_size):
        indices = chosen[first : first + rows]
        sequences_BW = np.zeros((rows, seq_len + 1), split.dtype)
        counts_BT = np.zeros((rows, seq_len), np.bool_)
        whole = int((indices < split.num_sequences(seq_len)).sum())
        if whole:
            reader.read(split, indices[:whole], seq_len, sequences_BW[:whole])
        if whole < len(indices):
            last = split.read_tokens(int(indices[-1]) * seq_len, split.num_tokens)
            sequences_BW[whole, : len(last)] = last
        for row, index in enumerate(indices):
            start = int(index) * seq_len + 1
            stop = min(start + seq_len, end)
            counts_BT[row, : stop - start] = (
                split.read_mask_range(start, stop) if split.has_mask else True
            )
        doc_ids_BT = None
        if document_mask:
            doc_ids_BT = np.zeros((rows, seq_len), np.int32)
            split.read_document_ids(indices, seq_len, doc_ids_BT[: len(indices)])
        yield _micro_batch(
            _on_device(sequences_BW, device),
            _on_device(counts_BT, device),
            None if doc_ids_BT is None else _on_device(doc_ids_BT, device),
        )


def _on_device(array: Array, device: str) -> Tensor:
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).to(device)
