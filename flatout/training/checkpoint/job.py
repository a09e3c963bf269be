"""The stages of a save: a snapshot in the loop, a write on every rank, a merge on the main rank.

All ranks agree between stages, in the loop. Whether a stage runs in the loop or in a thread is up
to the caller.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.json_io import JsonObject
from flatout.training.agreement import WRITING, together
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.location import checkpoints_folder, claim, make_folder
from flatout.training.checkpoint.snapshot import Snapshot, complete, take, write_share

if TYPE_CHECKING:
    from flatout.assembly.run import Run

Work = Callable[[], object]


Job = Future[None]
"""Work that has been started; `result` waits for its end, and raises its error."""


def at_once(work: Work) -> Job:
    """Do the work, and return the finished job."""
    job = Job()
    do(work, job)
    return job


def do(work: Work, job: Job) -> None:
    """Do the work of a job; its error is raised by `result`, where all ranks learn of it."""
    try:
        work()
        job.set_result(None)
    except BaseException as error:
        job.set_exception(error)


def nothing() -> None:
    """Do nothing."""


class Saving:
    """One checkpoint being saved. Every rank creates one at the same step and calls `advance`.

    All ranks call `advance` at the same points of the loop. A kill at any moment leaves earlier
    checkpoints untouched. The constructor and `advance` raise on every rank: RunFailed when a file
    cannot be written; CheckpointError when the state contains something that a checkpoint cannot
    store, or the directory belongs to another run.
    """

    _is_abandoned = False

    def __init__(
        self,
        run: Run,
        environment: JsonObject,
        *,
        info: JsonObject | None = None,
        start: Callable[[Work], Job],
        copied: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
        afterwards: Callable[[], object] = nothing,
    ) -> None:
        self.step = run.step
        self.path = catalog.checkpoint_path(run.folder, run.step)
        """Path of the checkpoint once it is complete."""
        self.aside: list[Path] = []
        """New paths of the checkpoints of later steps, which were set aside."""
        self.mesh = run.mesh
        self._start = start
        self._temporary = self.path.with_name(
            run.mesh.broadcast_object(f"{self.path.name}.tmp-{secrets.token_hex(4)}")
        )

        def make() -> None:
            claim(run.folder, checkpoints_folder(run.folder))
            make_folder(self._temporary.parent)
            self._temporary.mkdir()

        def write() -> None:
            write_share(snapshot, self._temporary)

        def merge() -> None:
            self._complete(snapshot, afterwards)

        def write_and_merge() -> None:
            write()
            merge()

        try:
            together(run.mesh, make if run.mesh.is_main else nothing, WRITING)
            snapshot = together(run.mesh, lambda: copied(take(run, environment, info)), WRITING)
        except BaseException:
            self._remove()
            raise
        self._remaining: list[Work] = (
            [write_and_merge]
            if run.mesh.world_size == 1
            else [write, merge if run.mesh.is_main else nothing]
        )
        self._job = start(self._remaining.pop(0))

    def is_ready(self) -> bool:
        """Return whether `advance` would not have to wait for this rank."""
        return self._job.done()

    def advance(self) -> bool:
        """Wait for the current stage on all ranks, start the next, and return whether all are done.

        Once all are done, the checkpoint is complete.
        """
        try:
            together(self.mesh, self._job.result, WRITING)
        except BaseException:
            if self._job.done():
                self._remove()
            # else an interrupt leaves the thread running: the run's next start cleans up
            raise
        if not self._remaining:
            return True
        self._job = self._start(self._remaining.pop(0))
        return False

    def abandon(self) -> None:
        """Let a thread that still writes remove the files instead of completing the checkpoint.

        Returns at once; if the process ends first, the run's next start removes them.
        """
        self._is_abandoned = True

    def wait_alone(self) -> bool:
        """Wait for this rank's own work, and return whether the checkpoint is complete.

        For the end of a run, when other ranks can no longer be reached.
        Raises: the error of the work.
        """
        self._job.result()
        return not self._remaining

    def _complete(self, snapshot: Snapshot, afterwards: Callable[[], object]) -> None:
        if self._is_abandoned:
            self._remove()
            return
        self.aside += complete(snapshot, self._temporary)
        afterwards()

    def _remove(self) -> None:
        if self.mesh.is_main:
            shutil.rmtree(self._temporary, ignore_errors=True)
