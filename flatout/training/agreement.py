"""Agreement between ranks: work that fails on all ranks if it fails on one, and votes.

Only the training loop calls collectives, in the same order on every rank. Other threads never do.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from flatout.errors import DiskFull, RunFailed
from flatout.storage.files import disk_fix, is_full

if TYPE_CHECKING:
    from flatout.distributed.mesh import Mesh
    from flatout.distributed.rendezvous import Ranks

SHARED_WAIT_S = 10.0
SHARED_FIX = (
    "Start all processes in one shared directory, "
    "or set --run-dir to an absolute path on a disk that all machines mount."
)
Result = TypeVar("Result")
WRITING, READING = "cannot write", "cannot read"


def together(mesh: Mesh, work: Callable[[], Result], what: str) -> Result:
    """Do this rank's part of WRITING or READING a checkpoint, and return its result.

    All ranks call it. If it fails on one rank, it fails on all, so no rank waits for one that has
    ended.
    Raises: RunFailed when the disk returns an error or another rank failed, which is DiskFull, on
            all ranks, when full disks are the only cause. Other errors of `work` pass unchanged.
    """
    error: Exception | None = None
    try:
        result = work()
    except (OSError, SafetensorError) as cause:
        kind = DiskFull if is_full(cause) else RunFailed
        error = kind(f"A checkpoint {what} its files: {cause}.", fix=disk_fix(cause))
        error.__cause__ = cause
    except Exception as cause:  # raised below, after the other ranks are told
        error = cause
    failed = full = 0.0
    try:
        if mesh.world_size > 1:
            votes = (float(error is not None), float(isinstance(error, DiskFull)))
            sums = mesh.sum(*(torch.tensor(vote, device=mesh.device) for vote in votes))
            failed, full = map(float, sums)
    except Exception:
        if error is not None:
            raise error from None
        raise
    if isinstance(error, DiskFull) and failed != full:
        error = RunFailed(error.what, fix=error.fix)
    if error is not None:
        raise error
    if failed:
        raise (DiskFull if failed == full else RunFailed)(
            "Another process of this run could not read or write a checkpoint.",
            fix="See the message of that process.",
        )
    return result


def require_shared(ranks: Ranks, lock: Path, *, wait_s: float = SHARED_WAIT_S) -> None:
    """Check, by its lock file, that all processes see rank 0's run directory.

    Raises: RunFailed when a process sees no lock file, or one with different content.
    """
    if ranks.world_size == 1:
        return
    run_folder = str(lock.parent.absolute())
    box = [(_text(lock), run_folder, socket.gethostname()) if ranks.rank == 0 else ("", "", "")]
    dist.broadcast_object_list(box, src=0)
    written, main_folder, host = box[0]
    give_up = time.monotonic() + wait_s
    while (
        not (seen := lock.exists() and _text(lock) in {"", written}) and time.monotonic() < give_up
    ):
        time.sleep(0.2)  # a network file system may show the files of other machines late
    found: list[bool] = [False] * ranks.world_size
    dist.all_gather_object(found, seen)
    if not seen:
        raise RunFailed(
            f"Process {ranks.rank} on {socket.gethostname()} "
            f"cannot see the run directory of rank 0, {main_folder} on {host}. "
            f"It uses {run_folder}.",
            fix=SHARED_FIX,
        )
    if not all(found):
        others = ", ".join(str(number) for number, sees in enumerate(found) if not sees)
        raise RunFailed(
            f"Some processes cannot see the run directory {main_folder} on {host}: {others}.",
            fix=SHARED_FIX,
        )


def _text(path: Path) -> str:
    """Return the content of a lock file, or "" when it cannot be read (yet)."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class Vote:
    """A yes or no from each rank, counted on the device and read one step later.

    Every rank votes at the same point in the loop. Reading the count immediately would stall the
    GPU. One step later it has long been computed.
    """

    def __init__(self, mesh: Mesh, yes: bool) -> None:
        on_cuda = mesh.device.type == "cuda"
        vote = torch.tensor(float(yes), pin_memory=on_cuda).to(mesh.device, non_blocking=True)
        (total,) = mesh.sum(vote)
        self._sum: Tensor = (
            torch.empty((), pin_memory=True).copy_(total, non_blocking=True) if on_cuda else total
        )
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        if self._copied:
            self._copied.record()

    def count(self) -> int:
        """Return how many ranks voted yes, waiting only for the copy from the device."""
        if self._copied:
            self._copied.synchronize()
        return int(self._sum)
