"""How the ranks of a run do the same at the same step: work that fails on all of them when it fails on one, and votes.

The collectives of a run are called by its loop alone, in one order on every rank; threads beside it call none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from flatout.errors import RunFailed
from flatout.training.files import way_out

if TYPE_CHECKING:
    from flatout.parallel.mesh import Mesh

WRITING, READING = "cannot write", "cannot read"


def together(mesh: Mesh, work: Callable[[], object], what: str) -> None:
    """Do one rank's part of WRITING or READING a checkpoint, and wait for the others.

    When it fails anywhere, it fails everywhere, so that no rank waits for one that is gone.
    Raises: RunFailed when the disk refuses; what else `work` raises; RunFailed where another rank failed.
    """
    error: Exception | None = None
    try:
        work()
    except (OSError, SafetensorError) as cause:
        error = RunFailed(f"A checkpoint {what} its files: {cause}.", fix=way_out(cause))
        error.__cause__ = cause
    except Exception as cause:  # raised below, once the others know
        error = cause
    try:
        (failures,) = mesh.sum(torch.tensor(float(error is not None), device=mesh.device)) if mesh.world_size > 1 else (0.0,)
    finally:
        if error is not None:
            raise error
    if float(failures):
        raise RunFailed("Another process of this run could not use a checkpoint.", fix="See that process's own message.")


class Vote:
    """One wish of each rank, counted on the device. Every rank casts it at the same place, and reads it a step later.

    A rank that asked all others and waited would stall its GPU; a step later the device has long counted.
    """

    def __init__(self, mesh: Mesh, wanted: bool) -> None:
        on_cuda = mesh.device.type == "cuda"
        vote = torch.tensor(float(wanted), pin_memory=on_cuda).to(mesh.device, non_blocking=True)
        (total,) = mesh.sum(vote)
        self._sum: Tensor = torch.empty((), pin_memory=True).copy_(total, non_blocking=True) if on_cuda else total
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        if self._copied:
            self._copied.record()

    def count(self) -> int:
        """Return how many ranks wanted it; waits for the copy alone."""
        if self._copied:
            self._copied.synchronize()
        return int(self._sum)
