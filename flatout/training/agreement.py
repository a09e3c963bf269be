"""How the ranks of a run do the same at the same step: work that fails on all of them when it fails
on one, and votes.

The collectives of a run are called by its loop alone, in one order on every rank; threads beside it
call none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from flatout.errors import RunFailed
from flatout.files import way_out
from flatout.training.run_dir import layout

if TYPE_CHECKING:
    from flatout.parallel.mesh import Mesh
    from flatout.parallel.rendezvous import Ranks

SHARED_PATIENCE_S = 10.0
SHARED_FIX = "Start all processes in one directory that they share, or give --run-dir an absolute path on a disk that all machines mount."
WRITING, READING = "cannot write", "cannot read"


def together(mesh: Mesh, work: Callable[[], object], what: str) -> None:
    """Do one rank's part of WRITING or READING a checkpoint, and wait for the others.

    When it fails anywhere, it fails everywhere, so that no rank waits for one that is gone.
    Raises: RunFailed when the disk refuses; what else `work` raises; RunFailed where another rank
            failed.
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
        (failures,) = (
            mesh.sum(torch.tensor(float(error is not None), device=mesh.device))
            if mesh.world_size > 1
            else (0.0,)
        )
    finally:
        if error is not None:
            raise error
    if float(failures):
        raise RunFailed(
            "Another process of this run could not use a checkpoint.",
            fix="See that process's own message.",
        )


def require_shared(
    ranks: Ranks, run_folder: Path, *, patience_s: float = SHARED_PATIENCE_S
) -> None:
    """Check that every process finds the main one's run directory, whose lock file tells it from
    others of that name.

    Raises: RunFailed.
    """
    if ranks.world_size == 1:
        return
    lock = run_folder / layout.LOCK
    box = [
        (_text(lock), str(run_folder.absolute()), socket.gethostname())
        if ranks.rank == 0
        else ("", "", "")
    ]
    dist.broadcast_object_list(box, src=0)
    written, place, host = box[0]
    give_up = time.monotonic() + patience_s
    while (
        not (seen := lock.exists() and _text(lock) in {"", written}) and time.monotonic() < give_up
    ):
        time.sleep(0.2)  # a network file system shows another machine's files late
    found: list[bool] = [False] * ranks.world_size
    dist.all_gather_object(found, seen)
    if not seen:
        raise RunFailed(
            f"Process {ranks.rank} on {socket.gethostname()} does not find the run directory of the main process, {place} on {host}: "
            f"its own is {run_folder.absolute()}.",
            fix=SHARED_FIX,
        )
    if not all(found):
        others = ", ".join(str(number) for number, sees in enumerate(found) if not sees)
        raise RunFailed(
            f"{place} on {host} is not the run directory of all processes: not of {others}.",
            fix=SHARED_FIX,
        )


def _text(path: Path) -> str:
    """Return what a lock file holds; nothing of one that cannot be read, or that another machine
    has not sent yet.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class Vote:
    """One wish of each rank, counted on the device. Every rank casts it at the same place, and
    reads it a step later.

    A rank that asked all others and waited would stall its GPU; a step later the device has long
    counted.
    """

    def __init__(self, mesh: Mesh, wanted: bool) -> None:
        on_cuda = mesh.device.type == "cuda"
        vote = torch.tensor(float(wanted), pin_memory=on_cuda).to(mesh.device, non_blocking=True)
        (total,) = mesh.sum(vote)
        self._sum: Tensor = (
            torch.empty((), pin_memory=True).copy_(total, non_blocking=True) if on_cuda else total
        )
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        if self._copied:
            self._copied.record()

    def count(self) -> int:
        """Return how many ranks wanted it; waits for the copy alone."""
        if self._copied:
            self._copied.synchronize()
        return int(self._sum)
