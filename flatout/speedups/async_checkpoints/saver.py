"""Save a run's state in a background thread, from a copy in host memory that the loop makes.

Every save reuses the memory. From a GPU, the copy is made on a separate stream into pinned memory:
forward and backward passes overlap with it, and the next optimizer step waits for it on the GPU. On
a CPU it is made synchronously.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from torch import Tensor

from flatout.assembly.run import Saved
from flatout.hardware import Machine
from flatout.json_io import JsonObject
from flatout.parallel.mesh import Mesh
from flatout.progress import SILENT, Progress
from flatout.training.agreement import Vote
from flatout.training.checkpoint.job import Job, Saving, Work, at_once, do
from flatout.training.checkpoint.read_write import set_aside_line
from flatout.training.checkpoint.retention import prune
from flatout.training.checkpoint.snapshot import Snapshot, tensors_to_save

if TYPE_CHECKING:
    from flatout.assembly.run import Run

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, as torch's own do."""
PAGE = 4096
"""Bytes of the smallest memory page."""
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""
GIB = 2**30


class HostCopy:
    """Memory for one copy of a state, in one block."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._making_room: Thread | None = None
        self._unpin: weakref.finalize[..., HostCopy] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._sources: list[tuple[str, Tensor, Tensor]] = []

    def of(self, snapshot: Snapshot, device: torch.device) -> Snapshot:
        """Return the snapshot with copies of its tensors, which overwrite the previous copies.

        On a GPU they are valid after `wait`, and the weights must not change before
        `before_update`.
        """
        self.make_room(bytes_of(snapshot.all_tensors), device)
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in snapshot.tensors}
        pairs: list[tuple[str, Tensor, Tensor]] = []
        begin = 0
        for file, tensors in snapshot.tensors.items():
            for name, tensor in tensors.items():
                block = self._block[begin : begin + tensor.nbytes]
                copies[file][name] = block.view(tensor.dtype).view(tensor.shape)
                pairs.append((name, copies[file][name], tensor))
                begin += bytes_of((tensor,))
        if device.type == "cuda":
            self._copy_on_own_stream(pairs, snapshot.buffers, device)
        else:
            _copy((copy, tensor) for _, copy, tensor in pairs)
        return replace(snapshot, tensors=copies)

    def has_room(self, needed: int, machine: Machine, local_world_size: int) -> bool:
        """Return whether the host has memory for `needed` bytes in each of its processes."""
        self._await_room()
        return needed <= self._block.numel() or needed * local_world_size <= free_bytes(machine)

    def wait(self) -> None:
        """Wait until the copy is complete. Other threads continue meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = []

    def before_update(self) -> None:
        """Make work queued on the GPU from now on wait for the copy; the host does not wait."""
        if self._copied is not None:
            self._copied.wait()

    def _copy_on_own_stream(
        self, pairs: list[tuple[str, Tensor, Tensor]], buffers: frozenset[str], device: torch.device
    ) -> None:
        """Copy on a separate stream; the next forward pass waits for the buffers only.

        It may change them, and they are small.
        """
        now = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            _copy((copy, tensor) for name, copy, tensor in pairs if name in buffers)
            now.wait_event(self._stream.record_event())
            _copy((copy, tensor) for name, copy, tensor in pairs if name not in buffers)
            self._copied = self._stream.record_event()
        self._sources = pairs  # keeps their memory from being reused before it is copied

    def make_room_beside(self, num_bytes: int) -> None:
        """Start to allocate memory on the host in a thread; the first copy waits for it.

        Not for a GPU: pinning memory would break a CUDA graph that is being captured.
        """
        self._await_room()

        def make() -> None:
            with suppress(MemoryError):  # the first copy tries again, and raises
                self._block = _mapped(num_bytes)

        if num_bytes > self._block.numel():
            self._making_room = Thread(target=make, name="memory for copies", daemon=True)
            self._making_room.start()

    def _await_room(self) -> None:
        if self._making_room is not None:
            self._making_room.join()
            self._making_room = None

    def make_room(self, num_bytes: int, device: torch.device) -> None:
        """Allocate `num_bytes` unless there is a block that large, and pin it for a GPU.

        Cost: up to two seconds per gigabyte, which would otherwise delay the first save; a tenth of
              a second where the system maps it in huge pages.
        """
        self._await_room()
        if num_bytes <= self._block.numel():
            return
        if self._unpin is not None:
            self._unpin()
        self._block = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
        self._block = _mapped(num_bytes)
        if device.type == "cuda" and _pin(self._block, device):
            self._unpin = weakref.finalize(self, _unpin, self._block.data_ptr())
            self._unpin.atexit = False  # the system unpins the memory of a process that ends


def _mapped(num_bytes: int) -> Tensor:
    """Return new memory that the system has mapped: it does so at the first write.

    That is faster from several threads than from the driver's single one, which pins it, and in
    huge pages, for which numpy asks.
    """
    block = torch.from_numpy(np.empty(num_bytes, np.uint8))
    block[::PAGE] = 0
    return block


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that a copy of these tensors takes.

    Shapes: tensors of any shape.
    """
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def free_bytes(machine: Machine) -> int:
    """Return the free host memory, within the limits of the system and of a container."""
    return min(
        psutil.virtual_memory().available,
        int(machine.memory_gib * GIB) - psutil.Process().memory_info().rss,
    )


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for copy, tensor in pairs:
        copy.copy_(tensor, non_blocking=True)


def _pin(block: Tensor, device: torch.device) -> bool:
    """Pin the block through the driver and return whether it did; unpinned copies are only slower.

    torch's own allocator rounds sizes up to a power of two, which would take up to twice the
    memory.
    """
    with torch.cuda.device(device):
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        refused = int(driver.cudaHostRegister(block.data_ptr(), block.numel(), PORTABLE))
        if refused:
            with suppress(RuntimeError):  # the next launch reports the same error again
                torch.zeros(1, device=device)
    return not refused


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def in_thread(work: Work) -> Job:
    """Start the work in a daemon thread: a process that exits does not wait for it.

    A half-written checkpoint does not count.
    """
    job = Job()
    Thread(target=do, args=(work, job), name="checkpoint", daemon=True).start()
    return job


class BackgroundSaver:
    """Copies the state in the loop and writes it in a thread, one checkpoint at a time.

    The files are the same as those of a save in the loop. Every rank calls every method, at the
    same points.
    Memory: one copy of this rank's share of the state, on the host, from `reserve` or the first
            save to the end of the run. If the host has no room for it, the loop writes the state.
    """

    def __init__(self) -> None:
        self.newest_step: int | None = None
        """The last step that this process started to save."""
        self._copy = HostCopy()
        self._has_copy = True
        self._saving: Saving | None = None
        self._vote: Vote | None = None
        self._began_s = self._blocked_s = 0.0
        self._saved: list[Saved] = []
        self._mesh: Mesh | None = None

    def reserve(self, run: Run, progress: Progress = SILENT) -> int:
        """Allocate memory for the copy, so that the first save is as fast as later ones.

        On a CPU, training continues meanwhile.

        Returns: its bytes; 0 when the size is not known before the first step or the host has no
                 room: the first save then decides.
        """
        tensors = tensors_to_save(run)
        num_bytes = bytes_of(tensors) if tensors is not None else 0
        if not num_bytes or not self._copy.has_room(
            num_bytes, run.machine, run.mesh.local_world_size
        ):
            return 0
        if run.mesh.device.type == "cpu":
            self._copy.make_room_beside(num_bytes)
            return num_bytes
        with progress.task("Allocating memory for copies of the state"):
            self._copy.make_room(num_bytes, run.mesh.device)
        return num_bytes

    def save(
        self,
        run: Run,
        *,
        environment: JsonObject,
        keep: int | None,
        keep_every: int | None = None,
        info: JsonObject | None = None,
        progress: Progress = SILENT,
    ) -> None:
        """Copy the state and start writing it; once complete, delete what `prune` does not keep.

        Raises: RunFailed, CheckpointError, as `checkpoint.save` does, and for the previous save.
        """
        self.wait(progress)
        best_step = run.best_step  # as of this checkpoint: a later best is not on disk yet
        self._began_s, self._blocked_s = time.perf_counter(), 0.0

        def copied(snapshot: Snapshot) -> Snapshot:
            self._has_copy = self._copy.has_room(
                bytes_of(snapshot.all_tensors), run.machine, run.mesh.local_world_size
            )
            if self._has_copy:
                return self._copy.of(snapshot, run.mesh.device)
            progress.say(
                "The host has no memory for a copy of the state: "
                "the loop waits until it is written."
            )
            return snapshot

        self._mesh, self._vote = run.mesh, None
        self._saving = Saving(
            run,
            environment,
            info=info,
            start=self._start,
            copied=copied,
            afterwards=lambda: prune(run.folder, keep, best_step, keep_every),
        )
        self.newest_step = run.step
        self._blocked_s += time.perf_counter() - self._began_s

    def finished(self, progress: Progress = SILENT) -> list[Saved]:
        """Return the checkpoints completed since the last call; called after every step.

        Raises: as `save`: what went wrong in the thread.
        """
        if self._saving is not None and self._all_ready(self._saving):
            self._advance(self._saving, progress)
        saved, self._saved = self._saved, []
        return saved

    def wait(self, progress: Progress = SILENT) -> None:
        """Wait until the checkpoint that is being written, if any, is complete.

        Raises: as `save`: what went wrong in the thread.
        """
        if self._saving is None:
            return
        with progress.task(f"Saving step {self._saving.step}"):
            while self._saving is not None:
                self._advance(self._saving, progress)

    def before_update(self) -> None:
        """Make the optimizer's step wait, on the GPU, until the weights have been copied."""
        if self._saving is not None:
            self._copy.before_update()

    def close(self, progress: Progress = SILENT) -> None:
        """Wait for the checkpoint being written, without asking other ranks.

        A failure here is reported, not raised.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            if saving.wait_alone():
                self._record(saving, progress)
        except Exception as error:  # the error that ends the run matters more
            progress.say(f"Step {saving.step} could not be saved: {error}")

    def abandon(self) -> None:
        """Give up the pending checkpoint without waiting; earlier checkpoints are not affected."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.abandon()

    def _start(self, work: Work) -> Job:
        if not self._has_copy:
            return at_once(work)

        def copied_work() -> None:
            self._copy.wait()
            work()

        return in_thread(copied_work)

    def _all_ready(self, saving: Saving) -> bool:
        """Return whether every rank has finished its stage; with several ranks, one step late."""
        assert self._mesh is not None, "a save has set the mesh"
        if self._mesh.world_size == 1:
            return saving.is_ready()
        before, self._vote = self._vote, Vote(self._mesh, saving.is_ready())
        return before is not None and before.count() == self._mesh.world_size

    def _advance(self, saving: Saving, progress: Progress) -> None:
        began_s = time.perf_counter()
        self._vote = None
        try:
            is_complete = saving.advance()
        except Exception:
            self._saving = self.newest_step = None
            raise
        self._blocked_s += time.perf_counter() - began_s
        if is_complete:
            self._saving = None
            self._record(saving, progress)

    def _record(self, saving: Saving, progress: Progress) -> None:
        self._saved.append(
            Saved(saving.step, saving.path, time.perf_counter() - self._began_s, self._blocked_s)
        )
        for path in saving.aside:
            progress.say(set_aside_line(path))
