"""A checkpoint on its way from a run to its folder: taken in the loop, written by each rank, joined
by the main one.

Between any two of these all ranks agree, in the loop; whether the work itself is done there or in a
thread is the caller's choice.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from flatout.training.agreement import WRITING, together
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.snapshot import Snapshot, complete, take, write_share

if TYPE_CHECKING:
    from flatout.assembly.run import Run

Work = Callable[[], object]


class Job(Protocol):
    """Work that was started."""

    def is_done(self) -> bool:
        """Say whether it is over, well or not."""

    def result(self) -> None:
        """Wait for its end, and raise what it raised."""


class AtOnce:
    """Work that is over when this is made."""

    def __init__(self, work: Work) -> None:
        self._error: BaseException | None = None
        try:
            work()
        except BaseException as error:  # raised by `result`, where all ranks learn of it
            self._error = error

    def is_done(self) -> bool:
        """Say yes."""
        return True

    def result(self) -> None:
        """Raise what the work raised."""
        if self._error is not None:
            raise self._error


class InThread:
    """Work that a thread does. A process that ends does not wait for it: what is half written does
    not count.
    """

    def __init__(self, work: Work) -> None:
        self._outcome: AtOnce | None = None
        self._thread = Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Work) -> None:
        self._outcome = AtOnce(work)

    def is_done(self) -> bool:
        """Say whether the thread is through."""
        return self._outcome is not None

    def result(self) -> None:
        """Wait for the thread, and raise what the work raised."""
        self._thread.join()
        assert self._outcome is not None, "a thread that has ended has an outcome"
        self._outcome.result()


def as_it_is(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot itself, whose tensors are the run's own."""
    return snapshot


def nothing() -> None:
    """Do nothing."""


class Saving:
    """One checkpoint being made. Every rank makes one at the same step, and calls `advance` at the
    same places.

    A kill at any moment leaves the checkpoints before untouched. Raises, here and in `advance`, on
    every rank: RunFailed when a file cannot be written; CheckpointError when the state holds what a
    checkpoint cannot, or the folder is another run's.
    """

    def __init__(
        self,
        run: Run,
        environment: Mapping[str, Any],
        *,
        start: Callable[[Work], Job],
        copied: Callable[[Snapshot], Snapshot] = as_it_is,
        afterwards: Callable[[], object] = nothing,
    ) -> None:
        self.step = run.step
        self.path = catalog.checkpoint_path(run.folder, run.step)
        """Where the checkpoint lies once it is whole."""
        self.aside: list[Path] = []
        """Checkpoints of later steps, of a course that was left, under the names they were given.
        """
        self._mesh = run.mesh
        self._start = start
        self._temporary = self.path.with_name(
            run.mesh.broadcast_object(f"{self.path.name}.tmp-{secrets.token_hex(4)}")
        )
        taken: list[Snapshot] = []

        def make() -> None:
            catalog.claim(run.folder, catalog.checkpoints_folder(run.folder))
            self._temporary.mkdir(parents=True)

        def write() -> None:
            write_share(taken[0], self._temporary)

        def join() -> None:
            self.aside += complete(taken[0], self._temporary)
            afterwards()

        def both() -> None:
            write()
            join()

        try:
            together(run.mesh, make if run.mesh.is_main else nothing, WRITING)
            together(run.mesh, lambda: taken.append(copied(take(run, environment))), WRITING)
        except BaseException:
            self._give_up()
            raise
        self._left: list[Work] = (
            [both] if run.mesh.world_size == 1 else [write, join if run.mesh.is_main else nothing]
        )
        self._job = start(self._left.pop(0))

    def is_ready(self) -> bool:
        """Say whether `advance` would not have to wait for this rank."""
        return self._job.is_done()

    def advance(self) -> bool:
        """Wait until every rank has done what it is at, start what comes next, and say whether the
        checkpoint is whole.
        """
        try:
            together(self._mesh, self._job.result, WRITING)
        except BaseException:
            if (
                self._job.is_done()
            ):  # an interrupt leaves the thread at work: the next start of the run sweeps up
                self._give_up()
            raise
        if not self._left:
            return True
        self._job = self._start(self._left.pop(0))
        return False

    def wait_alone(self) -> bool:
        """Wait for this rank's own work when the others can no longer be asked; say whether the
        checkpoint is whole.

        Raises: what the work raised.
        """
        self._job.result()
        return not self._left

    def _give_up(self) -> None:
        if self._mesh.is_main:
            shutil.rmtree(self._temporary, ignore_errors=True)
