"""A copy of a run's state in host memory, which every save reuses.

From a GPU, it is made on a separate stream into pinned memory: forward and backward passes overlap
with it, and the next optimizer step waits for it on the GPU. On a CPU it is made synchronously.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from torch import Tensor

from flatout.hardware.machine import Machine

if TYPE_CHECKING:
    from flatout.assembly.run import Run

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, as torch's own do."""
PAGE = 4096
"""Bytes of the smallest memory page."""
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""
GIB = 2**30
Files = Mapping[str, Mapping[str, Tensor]]
"""Tensors by file and name."""


class HostCopy:
    """Memory for one copy of a state, in one block."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostCopy] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._sources: list[tuple[Tensor, Tensor]] = []

    def of(
        self, files: Files, buffers: Collection[str], device: torch.device
    ) -> dict[str, dict[str, Tensor]]:
        """Return copies of tensors, by file and name, which overwrite the previous copies.

        On a GPU they are valid after `wait`, and the weights must not change before
        `before_update`, except for the tensors that `buffers` names.
        """
        self.make_room(bytes_of(files), device)
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in files}
        first: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[Tensor, Tensor]] = []
        begin = 0
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                block = self._block[begin : begin + tensor.nbytes]
                copies[file][name] = block.view(tensor.dtype).view(tensor.shape)
                (first if name in buffers else others).append((copies[file][name], tensor))
                begin += _aligned(tensor)
        if device.type == "cuda":
            now = torch.cuda.current_stream(device)
            self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(now)
            with torch.cuda.stream(self._stream):
                _copy(first)  # small, and the next forward pass may change them
                now.wait_event(self._stream.record_event())
                _copy(others)
                self._copied = self._stream.record_event()
            self._sources = first + others  # their memory is not reused before it is copied
        else:
            _copy(first + others)
        return copies

    def has_room(self, needed: int, run: Run) -> bool:
        """Return whether the host has memory for `needed` bytes in each of its processes."""
        in_all = needed * run.mesh.local_world_size
        return needed <= self._block.numel() or in_all <= free_bytes(run.machine)

    def wait(self) -> None:
        """Wait until the copy is complete. Other threads continue meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = []

    def before_update(self) -> None:
        """Make work queued on the GPU from now on wait for the copy. The host does not wait."""
        if self._copied is not None:
            self._copied.wait()

    def make_room(self, num_bytes: int, device: torch.device) -> None:
        """Allocate `num_bytes` unless there is a block that large, and pin it for a GPU.

        Cost: up to two seconds per gigabyte, once. A tenth of a second where the system maps it in
              huge pages.
        """
        if num_bytes <= self._block.numel():
            return
        if self._unpin is not None:
            self._unpin()
        self._block = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
        self._block = _mapped(num_bytes)
        if device.type == "cuda" and _pin(self._block, device):
            driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._unpin = weakref.finalize(self, driver.cudaHostUnregister, self._block.data_ptr())
            self._unpin.atexit = False  # the system unpins the memory of a process that ends


def _mapped(num_bytes: int) -> Tensor:
    """Return new memory that the system has mapped: it does so at the first write.

    That is faster from several threads than from the driver's single one, which pins it, and in
    huge pages, for which numpy asks.
    """
    block = torch.from_numpy(np.empty(num_bytes, np.uint8))
    block[::PAGE] = 0
    return block


def bytes_of(files: Files) -> int:
    """Return the bytes that a copy of these tensors takes."""
    return sum(_aligned(tensor) for tensors in files.values() for tensor in tensors.values())


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def free_bytes(machine: Machine) -> int:
    """Return the free host memory, within the limits of the system and of a container."""
    return min(
        psutil.virtual_memory().available,
        int(machine.memory_gib * GIB) - psutil.Process().memory_info().rss,
    )


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for copy, tensor in pairs:
        copy.copy_(tensor, non_blocking=True)


def _pin(block: Tensor, device: torch.device) -> bool:
    """Pin the block through the driver and return whether it did. Unpinned copies are only slower.

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
