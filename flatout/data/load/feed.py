"""The feed: from the rows that a step reads to tensors on the device, ahead of time or when they
are asked for.

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
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from flatout.data.load.batches import SequenceReader, StepReader, check_documents
from flatout.data.store.shards import Split
from flatout.progress import SILENT, Progress

IGNORED = -1
"""The target of a position that does not count."""


@dataclass(frozen=True)
class MicroBatch:
    """What one call of the model takes."""

    tokens_BT: Tensor
    """int64, contiguous."""
    targets_BT: Tensor
    """int64, contiguous: the next token, -1 where it does not count."""
    doc_ids_BT: Tensor | None
    """int32: which document of its window a position belongs to; None when attention crosses
    documents.
    """


@dataclass(frozen=True)
class StepBatch:
    """One optimiser step's share of one rank, on the device. The tensors belong to whoever holds
    the batch.
    """

    sequences_ABW: Tensor
    """uint16, or int32 for a vocabulary above 65,536: a quarter or half of what int64 would send to
    the device.
    """
    mask_ABT: Tensor | None
    """bool, True where the target counts; None when all do."""
    doc_ids_ABT: Tensor | None
    """int32; None when attention crosses documents."""
    position: int
    """Where the reading of all ranks stands after this batch."""
    tokens: int
    """Targets that all ranks have in this step; padding does not count."""
    samples: int
    """Rows that all ranks have in this step, less those of padding alone."""
    wait_ms: float
    """How long the caller was kept waiting for it."""

    @property
    def seq_len(self) -> int:
        """Inputs of a row."""
        return self.sequences_ABW.shape[2] - 1

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the step has."""
        return len(self.sequences_ABW)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the step's micro-batches; tokens become int64 here, on the device."""
        for a, sequences_BW in enumerate(self.sequences_ABW):
            mask_BT = None if self.mask_ABT is None else self.mask_ABT[a]
            doc_ids_BT = None if self.doc_ids_ABT is None else self.doc_ids_ABT[a]
            yield _micro_batch(sequences_BW, mask_BT, doc_ids_BT)


def _micro_batch(
    sequences_BW: Tensor, mask_BT: Tensor | None, doc_ids_BT: Tensor | None
) -> MicroBatch:
    targets_BT = _plain(sequences_BW[:, 1:])
    if mask_BT is not None:
        targets_BT.masked_fill_(~mask_BT, IGNORED)
    return MicroBatch(_plain(sequences_BW[:, :-1]), targets_BT, doc_ids_BT)


def _plain(tokens_BT: Tensor) -> Tensor:
    """int64 with the strides of a fresh tensor: of a single row torch would keep those of the
    window, for which a compiler compiles anew.
    """
    return tokens_BT.to(torch.int64, memory_format=torch.contiguous_format)


class _Buffer:
    """Host memory for one step, filled again and again; pinned when a GPU is to copy from it by
    itself.
    """

    def __init__(self, steps: StepReader, *, pinned: bool) -> None:
        plan = steps.plan
        self._steps, self._accumulate, self._device = (
            steps,
            plan.accumulate,
            torch.device(plan.device),
        )
        tokens = plan.accumulate * max(rows * seq_len for rows, seq_len in steps.shapes)
        lasts = plan.accumulate * max(rows for rows, _ in steps.shapes)
        stored = torch.uint16 if steps.dtype.itemsize == 2 else torch.int32
        self._windows = torch.empty(tokens + lasts, dtype=stored, pin_memory=pinned)
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
        """Read this rank's rows of the step that begins at `position`; return a copy on the device,
        which the next step does not touch.

        On a GPU the copy is queued on the current stream, and this memory is filled again only when
        it has ended.
        """
        if self._copied is not None:
            self._copied.synchronize()
        rows, seq_len = self._steps.shape_at(position)
        sequences_NW = self._rows(self._windows, rows, seq_len + 1)
        mask_NT, doc_ids_NT = (
            self._rows(flat, rows, seq_len) for flat in (self._mask, self._doc_ids)
        )
        mask, doc_ids = (
            None if tensor is None else tensor.numpy() for tensor in (mask_NT, doc_ids_NT)
        )
        read = self._steps.read(
            position, sequences_NW.numpy().view(self._steps.dtype), mask, doc_ids
        )
        if doc_ids is not None:
            for micro_BT in doc_ids.reshape(self._accumulate, -1, seq_len):
                check_documents(micro_BT, self._steps.plan.most_documents)
        batch = StepBatch(
            self._copy(sequences_NW),
            self._copy(mask_NT),
            self._copy(doc_ids_NT),
            **read._asdict(),
            wait_ms=0.0,
        )
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return batch

    def _rows(self, flat: Any, rows: int, width: int) -> Any:
        return None if flat is None else flat[: self._accumulate * rows * width].view(-1, width)

    def _copy(self, host: Any) -> Any:
        if host is None:
            return None
        if (
            self._device.type == "cpu"
        ):  # one plain copy: torch would wake all its threads, which costs more than the copy on busy cores
            return torch.from_numpy(host.numpy().copy()).view(self._accumulate, -1, host.shape[1])
        return host.to(self._device, non_blocking=self._copied is not None).view(
            self._accumulate, -1, host.shape[1]
        )


class _Feed:
    """What both feeds share: where the reading stands. It never ends."""

    def __init__(self, steps: StepReader) -> None:
        self.position: int = 0
        """Where the next step begins, as the steps' reader counts, over all epochs and ranks."""
        self._steps = steps

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read the split once, all sets of a mix together."""
        return self._steps.steps_per_epoch

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, tokens of a row) that a micro-batch may have, each once."""
        return tuple(dict.fromkeys((rows, seq_len) for rows, seq_len in self._steps.shapes))

    def prime(self, steps: int, *, progress: Progress = SILENT) -> None:
        """Let the reader get ready for the rows of the next `steps` steps, as many as it keeps;
        most readers need not.

        To be called before the first step: what a reader needs beforehand is then in no step's
        time.
        """
        self._steps.prime(self.position, steps, progress)

    def close(self) -> None:
        """Give back what the feed holds; reading on afterwards opens it again."""


class DirectFeed(_Feed):
    """Reads each step when it is asked for, in the caller's thread."""

    def __init__(self, steps: StepReader) -> None:
        super().__init__(steps)
        self._buffer = _Buffer(steps, pinned=False)

    def seek(self, position: int) -> None:
        """Go on at another position."""
        self.position = position

    def __next__(self) -> StepBatch:
        began = time.perf_counter()
        batch = self._buffer.read(self.position)
        self.position = batch.position
        return replace(batch, wait_ms=(time.perf_counter() - began) * 1e3)


class PrefetchFeed(_Feed):
    """Reads the next `prefetch` steps in one background thread; on a GPU their copies run on a
    stream of their own, from two pinned buffers.

    The thread starts at the first step that is asked for. An error in it is raised where that step
    is asked for.
    """

    def __init__(self, steps: StepReader) -> None:
        super().__init__(steps)
        self._ahead: _ReadAhead | None = None

    def seek(self, position: int) -> None:
        """Go on at another position; what was read ahead is dropped."""
        if position != self.position:
            self.close()
            self.position = position

    def __next__(self) -> StepBatch:
        began = time.perf_counter()
        if self._ahead is None:
            self._ahead = _ReadAhead(self._steps, self.position)
            self._stop = weakref.finalize(
                self, self._ahead.stop
            )  # a feed that is dropped without close() leaves no thread behind
        try:
            batch = self._ahead.take()
        except BaseException:
            self.close()
            raise
        self.position = batch.position
        return replace(batch, wait_ms=(time.perf_counter() - began) * 1e3)

    def close(self) -> None:
        """End the background thread; reading on afterwards starts another at the same position."""
        if self._ahead is not None:
            self._stop()
            self._ahead = None


class _ReadAhead:
    """One background thread that reads steps in order, from a position on, until it is stopped."""

    def __init__(self, steps: StepReader, position: int) -> None:
        self._device = torch.device(steps.plan.device)
        self._room = threading.Semaphore(steps.plan.prefetch)
        self._ready: queue.SimpleQueue[tuple[StepBatch, Any] | BaseException] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._read, args=(steps, position), name="flatout-feed", daemon=True
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
        except BaseException as error:  # it is the caller's: it is raised there, whatever it is
            self._ready.put(error)

    def take(self) -> StepBatch:
        """Wait for the next step; raise what went wrong in the thread. The caller's stream waits
        for the copy, the caller does not.
        """
        found = self._ready.get()
        if isinstance(found, BaseException):
            try:
                raise found
            finally:
                del found  # the error holds this frame; without this the two would hold each other
        self._room.release()
        batch, copied = found
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in (batch.sequences_ABW, batch.mask_ABT, batch.doc_ids_ABT):
                if tensor is not None:
                    tensor.record_stream(
                        stream
                    )  # made on another stream: not to be used again before this one is done with it
        return batch

    def stop(self) -> None:
        """End the thread and wait for it; a second call does nothing."""
        self._stopping.set()
        self._room.release()
        if (
            self._thread is not threading.current_thread()
        ):  # it is when the collector drops a forgotten feed in there
            self._thread.join()


def evaluation_batches(
    split: Split,
    seq_len: int,
    rows: int,
    *,
    device: str,
    windows: SequenceReader,
    rank: int = 0,
    world_size: int = 1,
    max_tokens: int | None = None,
    document_mask: bool = False,
    most_documents: Callable[[int, int], int] | None = None,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a split read in order: every token but the first is a target
    exactly once.

    All batches have one shape and all ranks get the same number of them: what is missing of the
    last window, and windows that are missing, are padded with token 0 and the target -1.
    `max_tokens` takes the first so many targets only. A split of fewer than two tokens has no
    target and yields nothing. `most_documents` is as in `BatchPlan`.

    Shapes:  yields tokens_BT, targets_BT (rows, seq_len).
    Raises:  DataError when a batch has more documents than attention takes.
    """
    num_targets = max(
        min(split.num_tokens - 1, split.num_tokens if max_tokens is None else max_tokens), 0
    )
    num_sequences = -(-num_targets // seq_len)
    for first in range(0, num_sequences, rows * world_size):
        indices = np.arange(first + rank * rows, first + (rank + 1) * rows)
        indices = indices[indices < num_sequences]
        sequences_BW = np.zeros((rows, seq_len + 1), split.dtype)
        counts_BT = np.zeros((rows, seq_len), np.bool_)
        whole = int((indices < split.num_sequences(seq_len)).sum())
        if whole:
            windows.read(split, indices[:whole], sequences_BW[:whole])
        if whole < len(indices):
            last = split.read_tokens(int(indices[-1]) * seq_len, split.num_tokens)
            sequences_BW[whole, : len(last)] = last
        for row, window in enumerate(indices):
            start = int(window) * seq_len + 1
            stop = min(start + seq_len, num_targets + 1)
            counts_BT[row, : stop - start] = (
                split.read_mask_range(start, stop) if split.has_mask else True
            )
        doc_ids_BT = None
        if document_mask:
            doc_ids_BT = np.zeros((rows, seq_len), np.int32)
            split.read_document_ids(indices, seq_len, doc_ids_BT[: len(indices)])
            check_documents(doc_ids_BT, most_documents)
        yield _micro_batch(
            *(_on_device(array, device) for array in (sequences_BW, counts_BT, doc_ids_BT))
        )


def _on_device(array: Any, device: str) -> Any:
    if array is None:
        return None
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).to(device)
