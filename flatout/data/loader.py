"""The feed: from a split's windows to one optimiser step's tensors on the device, in an order that can be sought.

Letters in names: A micro-batches, B rows of one, T tokens of one window, W = T + 1, N = A * B windows of a rank's step.
"""

# ruff: noqa: N815  fields carry shape suffixes in capitals, as all tensors do

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from flatout.data.shards import Split, Windowed
from flatout.errors import DataError
from flatout.progress import SILENT, Progress

Array = np.ndarray[Any, np.dtype[Any]]

IGNORED = -1
"""The target of a position that does not count."""


class WindowReader(Protocol):
    """How the windows of a step are read."""

    def read(self, split: Windowed, indices: Array, out: Array) -> None:
        """Write window indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, W), dtype of the split.
        """


@runtime_checkable
class PrimedWindowReader(WindowReader, Protocol):
    """A reader that needs something of the windows before they are read, so that getting it is not part of a step."""

    def prime(self, split: Windowed, indices: Array, seq_len: int) -> bool:
        """Get ready to read windows `indices`; return whether there is room for more.

        Shapes:  indices (N,).
        """


class ShardWindows:
    """Windows copied straight from the shards."""

    def read(self, split: Windowed, indices: Array, out: Array) -> None:
        """Write window indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, W), dtype of the split.
        """
        split.read_windows(indices, out.shape[1] - 1, out)


@dataclass(frozen=True)
class MicroBatch:
    """What one call of the model takes."""

    tokens_BT: Tensor
    """int64, contiguous."""
    targets_BT: Tensor
    """int64, contiguous: the next token, -1 where it does not count."""
    doc_ids_BT: Tensor | None
    """int32: which document of its window a position belongs to; None when attention crosses documents."""


@dataclass(frozen=True)
class StepBatch:
    """One optimiser step's share of one rank, on the device. The tensors belong to whoever holds the batch."""

    windows_ABW: Tensor
    """uint16, or int32 for a vocabulary above 65,536: a quarter or half of what int64 would send to the device."""
    mask_ABT: Tensor | None
    """bool, True where the target counts; None when all do."""
    doc_ids_ABT: Tensor | None
    """int32; None when attention crosses documents."""
    position: int
    """Where the reading of all ranks stands after this batch, in windows."""
    wait_ms: float
    """How long the caller was kept waiting for it."""

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the step's micro-batches; tokens become int64 here, on the device."""
        for a, windows_BW in enumerate(self.windows_ABW):
            mask_BT = None if self.mask_ABT is None else self.mask_ABT[a]
            doc_ids_BT = None if self.doc_ids_ABT is None else self.doc_ids_ABT[a]
            yield _micro_batch(windows_BW, mask_BT, doc_ids_BT)


def _micro_batch(windows_BW: Tensor, mask_BT: Tensor | None, doc_ids_BT: Tensor | None) -> MicroBatch:
    targets_BT = windows_BW[:, 1:].to(torch.int64)
    if mask_BT is not None:
        targets_BT.masked_fill_(~mask_BT, IGNORED)
    return MicroBatch(windows_BW[:, :-1].to(torch.int64), targets_BT, doc_ids_BT)


@dataclass(frozen=True)
class FeedPlan:
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

    @property
    def windows_per_step(self) -> int:
        """Windows of one optimiser step over all ranks."""
        return self.accumulate * self.world_size * self.rows_per_device

    def positions(self, start: int) -> Array:
        """Return the positions of this rank's rows in the step that begins at `start`.

        Row b of micro-batch a on rank r is start + (a * world_size + r) * rows_per_device + b: whatever the number of
        ranks, the step as a whole reads the same windows.

        Shapes:  returns (A * B,).
        """
        micro = np.arange(self.accumulate)[:, np.newaxis] * self.world_size + self.rank
        rows_AB = start + micro * self.rows_per_device + np.arange(self.rows_per_device)
        return rows_AB.reshape(-1)


class _Buffer:
    """Host memory for one step, filled again and again; pinned when the device is a GPU and can copy from it by itself."""

    def __init__(self, split: Windowed, plan: FeedPlan, *, pinned: bool) -> None:
        self._shape = (plan.accumulate, plan.rows_per_device)
        self._device = torch.device(plan.device)
        rows, seq_len = plan.accumulate * plan.rows_per_device, plan.seq_len
        stored = torch.uint16 if split.dtype.itemsize == 2 else torch.int32
        self._windows = torch.empty((rows, seq_len + 1), dtype=stored, pin_memory=pinned)
        self._mask = torch.empty((rows, seq_len), dtype=torch.bool, pin_memory=pinned) if split.has_mask else None
        self._doc_ids = torch.empty((rows, seq_len), dtype=torch.int32, pin_memory=pinned) if plan.document_mask else None
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.position = 0

    def fill(self, split: Windowed, plan: FeedPlan, windows: WindowReader, position: int) -> None:
        """Read this rank's rows of the step that begins at `position`, once the last copy to the device has ended."""
        if self._copied is not None:
            self._copied.synchronize()
        indices = split.windows_at(plan.positions(position), plan.seq_len, seed=plan.seed)
        windows.read(split, indices, self._windows.numpy().view(split.dtype))
        if self._mask is not None:
            split.read_mask(indices, plan.seq_len, self._mask.numpy())
        if self._doc_ids is not None:
            split.read_document_ids(indices, plan.seq_len, self._doc_ids.numpy())
        self.position = position + plan.windows_per_step

    def hand_out(self, wait_ms: float) -> StepBatch:
        """Return a copy on the device, which the next fill does not touch."""
        batch = StepBatch(self._copy(self._windows), self._copy(self._mask), self._copy(self._doc_ids), self.position, wait_ms)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return batch

    def _copy(self, host: Any) -> Any:
        if host is None:
            return None
        if self._device.type == "cpu":  # one plain copy: torch would wake all its threads, which costs more than the copy on busy cores
            return torch.from_numpy(host.numpy().copy()).view(*self._shape, -1)
        return host.to(self._device, non_blocking=self._copied is not None).view(*self._shape, -1)


class _Feed:
    """What both feeds share: where the reading stands, and how many windows an epoch has. It never ends."""

    def __init__(self, split: Windowed, plan: FeedPlan, windows: WindowReader) -> None:
        self.num_windows = split.num_windows(plan.seq_len)
        if not self.num_windows:
            raise DataError(
                f"The {split.name} split holds {split.num_tokens} tokens; one window of data.seq_len={plan.seq_len} needs {plan.seq_len + 1}.",
                fix=f"Set data.seq_len={split.num_tokens - 1} or less, or prepare more text."
                if split.num_tokens > 1
                else f"Prepare more text: the {split.name} split is empty.",
            )
        self.position = 0
        """The next step's first window, counted over all epochs and ranks."""
        self._split, self._plan, self._windows = split, plan, windows

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def prime(self, steps: int, *, progress: Progress = SILENT) -> None:
        """Let the reader get ready for the windows of the next `steps` steps, as many as it keeps; most readers need not.

        To be called before the first step: what a reader needs beforehand is then in no step's time.
        """
        if not isinstance(self._windows, PrimedWindowReader):
            return
        plan, position = self._plan, self.position
        with progress.task("Taking the text of the windows", unit="windows") as task:
            for _ in range(steps):
                indices = self._split.windows_at(plan.positions(position), plan.seq_len, seed=plan.seed)
                more = self._windows.prime(self._split, indices, plan.seq_len)
                task.advance(len(indices))
                if not more:
                    break
                position += plan.windows_per_step

    def close(self) -> None:
        """Give back what the feed holds; reading on afterwards opens it again."""


class DirectFeed(_Feed):
    """Reads each step when it is asked for, in the caller's thread."""

    def __init__(self, split: Windowed, plan: FeedPlan, windows: WindowReader) -> None:
        super().__init__(split, plan, windows)
        self._buffer = _Buffer(split, plan, pinned=False)

    def seek(self, position: int) -> None:
        """Go on at another position."""
        self.position = position

    def __next__(self) -> StepBatch:
        began = time.perf_counter()
        self._buffer.fill(self._split, self._plan, self._windows, self.position)
        batch = self._buffer.hand_out((time.perf_counter() - began) * 1e3)
        self.position = batch.position
        return batch


class PrefetchFeed(_Feed):
    """Reads the next `prefetch` steps in one background thread, into buffers that are used again and again.

    The thread starts at the first step that is asked for. An error in it is raised where that step is asked for.
    """

    def __init__(self, split: Windowed, plan: FeedPlan, windows: WindowReader) -> None:
        super().__init__(split, plan, windows)
        self._ahead: _ReadAhead | None = None

    def seek(self, position: int) -> None:
        """Go on at another position; what was read ahead is dropped."""
        if position != self.position:
            self.close()
            self.position = position

    def __next__(self) -> StepBatch:
        began = time.perf_counter()
        if self._ahead is None:
            self._ahead = _ReadAhead(self._split, self._plan, self._windows, self.position)
            self._stop = weakref.finalize(self, self._ahead.stop)  # a feed that is dropped without close() leaves no thread behind
        try:
            buffer = self._ahead.take()
        except BaseException:
            self.close()
            raise
        batch = buffer.hand_out((time.perf_counter() - began) * 1e3)
        self._ahead.free.put(buffer)
        self.position = batch.position
        return batch

    def close(self) -> None:
        """End the background thread; reading on afterwards starts another at the same position."""
        if self._ahead is not None:
            self._stop()
            self._ahead = None


class _ReadAhead:
    """One background thread that fills buffers in order, from a position on, until it is stopped."""

    def __init__(self, split: Windowed, plan: FeedPlan, windows: WindowReader, position: int) -> None:
        self.free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Buffer | BaseException] = queue.SimpleQueue()
        self._stopping = threading.Event()
        pinned = torch.device(plan.device).type == "cuda"
        for _ in range(plan.prefetch):
            self.free.put(_Buffer(split, plan, pinned=pinned))
        self._thread = threading.Thread(target=self._fill, args=(split, plan, windows, position), name="flatout-feed", daemon=True)
        self._thread.start()

    def _fill(self, split: Windowed, plan: FeedPlan, windows: WindowReader, position: int) -> None:
        try:
            while (buffer := self.free.get()) is not None and not self._stopping.is_set():
                buffer.fill(split, plan, windows, position)
                position = buffer.position
                self._ready.put(buffer)
        except BaseException as error:  # it is the caller's: it is raised there, whatever it is
            self._ready.put(error)

    def take(self) -> _Buffer:
        """Wait for the next step's buffer; raise what went wrong in the thread."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            try:
                raise found
            finally:
                del found  # the error holds this frame; without this the two would hold each other
        return found

    def stop(self) -> None:
        """End the thread and wait for it; a second call does nothing."""
        self._stopping.set()
        self.free.put(None)
        if self._thread is not threading.current_thread():  # it is when the collector drops a forgotten feed in there
            self._thread.join()


def evaluation_batches(
    split: Split,
    seq_len: int,
    rows: int,
    *,
    device: str,
    windows: WindowReader,
    rank: int = 0,
    world_size: int = 1,
    max_tokens: int | None = None,
    document_mask: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a split read in order: every token but the first is a target exactly once.

    All batches have one shape and all ranks get the same number of them: what is missing of the last window, and windows
    that are missing, are padded with token 0 and the target -1. `max_tokens` takes the first so many targets only. A split
    of fewer than two tokens has no target and yields nothing.

    Shapes:  yields tokens_BT, targets_BT (rows, seq_len).
    """
    num_targets = max(min(split.num_tokens - 1, split.num_tokens if max_tokens is None else max_tokens), 0)
    num_windows = -(-num_targets // seq_len)
    for first in range(0, num_windows, rows * world_size):
        indices = np.arange(first + rank * rows, first + (rank + 1) * rows)
        indices = indices[indices < num_windows]
        windows_BW = np.zeros((rows, seq_len + 1), split.dtype)
        counts_BT = np.zeros((rows, seq_len), np.bool_)
        whole = int((indices < split.num_windows(seq_len)).sum())
        if whole:
            windows.read(split, indices[:whole], windows_BW[:whole])
        if whole < len(indices):
            last = split.read_tokens(int(indices[-1]) * seq_len, split.num_tokens)
            windows_BW[whole, : len(last)] = last
        for row, window in enumerate(indices):
            start = int(window) * seq_len + 1
            stop = min(start + seq_len, num_targets + 1)
            counts_BT[row, : stop - start] = split.read_mask_range(start, stop) if split.has_mask else True
        doc_ids_BT = None
        if document_mask:
            doc_ids_BT = np.zeros((rows, seq_len), np.int32)
            split.read_document_ids(indices, seq_len, doc_ids_BT[: len(indices)])
        yield _micro_batch(*(_on_device(array, device) for array in (windows_BW, counts_BT, doc_ids_BT)))


def _on_device(array: Any, device: str) -> Any:
    if array is None:
        return None
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).to(device)
