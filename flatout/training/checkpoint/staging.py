"""A copy of a run's state in the host's memory, kept from save to save, so that training may go on
while it is written.

From a GPU it is made on a stream of its own, into memory that the driver has pinned: forward and
backward run beside it, and the optimizer's next step waits for it, on the GPU. On a CPU it is made
at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor

from flatout.hardware import Machine
from flatout.models.split_weights import SplitTensor, join
from flatout.training.checkpoint.snapshot import Snapshot

ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple of it, as torch's own do."""
PAGE = 4096
"""Bytes of the system's smallest page of memory."""
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""
GIB = 2**30


class HostCopy:
    """Room for one copy of a state: as many bytes as the tensors have, in one block."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostCopy] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._sources: list[tuple[str, Tensor, Tensor]] = []

    def of(self, snapshot: Snapshot, device: torch.device) -> Snapshot:
        """Return the snapshot with copies of its tensors, in place of those of the last one.

        On a GPU they hold their values after `wait`, and the weights must not be changed before
        `before_update`.
        """
        self.make_room(bytes_of(snapshot.all_tensors), device)
        copies: dict[str, dict[str, Tensor]] = {}
        pairs: list[tuple[str, Tensor, Tensor]] = []
        for (file, name, tensor), (begin, end) in zip(
            _tensors(snapshot), _places(snapshot), strict=True
        ):
            copy = self._block[begin:end].view(tensor.dtype).view(tensor.shape)
            copies.setdefault(file, {})[name] = copy
            pairs.append((name, copy, tensor))
        if device.type == "cuda":
            self._copy_beside(pairs, snapshot.buffers, device)
        else:
            _copy((copy, tensor) for _, copy, tensor in pairs)
        return replace(snapshot, tensors=copies)

    def has_room(self, needed: int, machine: Machine, local_world_size: int) -> bool:
        """Say whether the host has the memory for a copy of `needed` bytes in each process on it."""
        return needed <= self._block.numel() or needed * local_world_size <= free_bytes(machine)

    def wait(self) -> None:
        """Wait until the copy holds its values. Lets other threads go on meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = []

    def before_update(self) -> None:
        """Let what is queued on the GPU from now on wait for the copy; the host does not wait."""
        if self._copied is not None:
            self._copied.wait()

    def _copy_beside(
        self, pairs: list[tuple[str, Tensor, Tensor]], buffers: frozenset[str], device: torch.device
    ) -> None:
        """Copy on a stream of its own. The next forward pass waits for what it may change: buffers,
        which are small.
        """
        now = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            _copy((copy, tensor) for name, copy, tensor in pairs if name in buffers)
            now.wait_event(self._stream.record_event())
            _copy((copy, tensor) for name, copy, tensor in pairs if name not in buffers)
            self._copied = self._stream.record_event()
        self._sources = pairs  # their memory must not go to others before it is copied

    def make_room(self, num_bytes: int, device: torch.device) -> None:
        """Take so much memory from the system, and for a GPU have it pinned, where there is less so
        far.

        Cost: about half a second a gigabyte. A first copy that had to do it would hold the loop for
              as long.
        """
        if num_bytes <= self._block.numel():
            return
        if self._unpin is not None:
            self._unpin()
        self._block = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        self._block[::PAGE] = (
            0  # the system gives memory when it is written to, and to several threads faster than to the driver's one
        )
        if device.type == "cuda" and _pin(self._block, device):
            self._unpin = weakref.finalize(self, _unpin, self._block.data_ptr())
            self._unpin.atexit = False  # the system takes back what a process has pinned


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that a copy of these takes.

    Shapes: tensors of any shape.
    """
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def free_bytes(machine: Machine) -> int:
    """Return what the host's memory still has for this process, as far as the system and a
    container's limit tell.
    """
    return min(
        psutil.virtual_memory().available,
        int(machine.memory_gib * GIB) - psutil.Process().memory_info().rss,
    )


def _tensors(snapshot: Snapshot) -> Iterator[tuple[str, str, Tensor]]:
    for file, tensors in snapshot.tensors.items():
        for name, tensor in tensors.items():
            yield file, name, tensor


def _places(snapshot: Snapshot) -> Iterator[tuple[int, int]]:
    """Yield where in the block each tensor's bytes begin and end."""
    begin = 0
    for _, _, tensor in _tensors(snapshot):
        num_bytes = tensor.numel() * tensor.element_size()
        yield begin, begin + num_bytes
        begin += _aligned(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for copy, tensor in pairs:
        copy.copy_(
            join(tensor.high, tensor.low) if isinstance(tensor, SplitTensor) else tensor,
            non_blocking=True,
        )


def _pin(block: Tensor, device: torch.device) -> bool:
    """Have the driver pin the block, and say whether it did; where it will not, copies take longer
    and are no less right.

    Pinned by torch's own allocator, a block would take up to twice the memory: that rounds sizes up
    to a power of two.
    """
    with torch.cuda.device(device):
        refused = int(_driver().cudaHostRegister(block.data_ptr(), block.numel(), PORTABLE))
        if refused:
            with suppress(
                RuntimeError
            ):  # the driver reports its refusal once more, at the next launch
                torch.zeros(1, device=device)
    return not refused


def _unpin(address: int) -> None:
    _driver().cudaHostUnregister(address)


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
