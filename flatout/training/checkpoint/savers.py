"""The two ways of saving a run's state: in the loop, which waits for the disk, or in a thread
beside it.

What comes to lie on the disk is the same. Every rank calls every method, and at the same places.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatout.assembly.run import Saved
from flatout.progress import SILENT, Progress
from flatout.training.agreement import WRITING, Vote, together
from flatout.training.checkpoint.catalog import prune
from flatout.training.checkpoint.job import AtOnce, InThread, Job, Saving, Work
from flatout.training.checkpoint.read_write import save, set_aside_line
from flatout.training.checkpoint.snapshot import Snapshot, tensors_to_save
from flatout.training.checkpoint.staging import HostCopy, bytes_of

if TYPE_CHECKING:
    from flatout.assembly.run import Run


class InTheLoop:
    """Saves while the loop waits: plain."""

    def __init__(self) -> None:
        self.newest_step: int | None = None
        """The last that was saved by this process."""
        self._whole: list[Saved] = []

    def reserve(self, run: Run, progress: Progress = SILENT) -> int:
        """Make room for a copy of the state before training begins, and return its bytes: there is
        none.
        """
        return 0

    def save(
        self, run: Run, *, environment: Mapping[str, Any], keep: int, progress: Progress = SILENT
    ) -> None:
        """Write the state, and drop the checkpoints that are no longer kept: all but the newest
        `keep` and the best.

        Raises: RunFailed, CheckpointError, as `checkpoint.save`.
        """
        began_s = time.perf_counter()
        path = save(run, environment=environment, progress=progress)
        together(
            run.mesh,
            lambda: prune(run.folder, keep, run.best_step) if run.mesh.is_main else None,
            WRITING,
        )
        seconds = time.perf_counter() - began_s
        self.newest_step = run.step
        self._whole.append(Saved(run.step, path, seconds, seconds))

    def finished(self, progress: Progress = SILENT) -> list[Saved]:
        """Return the checkpoints that have become whole since the last call."""
        whole, self._whole = self._whole, []
        return whole

    def wait(self, progress: Progress = SILENT) -> None:
        """Wait for what is being written: nothing ever is."""

    def before_update(self) -> None:
        """Let the optimizer's step wait for a copy of the weights: there is none."""

    def close(self, progress: Progress = SILENT) -> None:
        """Wait for what is being written, without asking other ranks: nothing ever is."""


class InBackground:
    """Copies the state in the loop and writes it in a thread, one checkpoint at a time: a second
    waits for the first.

    Memory: one copy of this rank's share of the state, on the host, from `reserve` or the first
            save to the end of the run. Where the
    host has no room for it, the state is written in the loop.
    """

    def __init__(self) -> None:
        self.newest_step: int | None = None
        """The last of which this process has begun a checkpoint."""
        self._copy = HostCopy()
        self._has_copy = True
        self._saving: Saving | None = None
        self._vote: Vote | None = None
        self._began_s = self._blocked_s = 0.0
        self._whole: list[Saved] = []
        self._mesh: Any = None

    def reserve(self, run: Run, progress: Progress = SILENT) -> int:
        """Make room for the copy before training begins, so that the first save takes no longer
        than the next; return its bytes.

        Where the size is not known before the first step, or the host has no room, nothing is done:
        the first save sees to it.
        """
        tensors = tensors_to_save(run)
        num_bytes = bytes_of(tensors) if tensors is not None else 0
        if not num_bytes or not self._copy.has_room(
            num_bytes, run.machine, run.mesh.local_world_size
        ):
            return 0
        with progress.task("Making room for copies of the state"):
            self._copy.make_room(num_bytes, run.mesh.device)
        return num_bytes

    def save(
        self, run: Run, *, environment: Mapping[str, Any], keep: int, progress: Progress = SILENT
    ) -> None:
        """Copy the state and begin to write it; drop the checkpoints that are no longer kept when
        it is whole.

        Raises: RunFailed, CheckpointError, as `checkpoint.save`, and for the save before as well.
        """
        self.wait(progress)
        best_step = run.best_step  # of this checkpoint: a later best is not on the disk yet
        self._began_s, self._blocked_s = time.perf_counter(), 0.0

        def copied(snapshot: Snapshot) -> Snapshot:
            self._has_copy = self._copy.has_room(
                bytes_of(snapshot.all_tensors), run.machine, run.mesh.local_world_size
            )
            if self._has_copy:
                return self._copy.of(snapshot, run.mesh.device)
            progress.say(
                "The host has no memory for a copy of the state: the loop waits until it is written."
            )
            return snapshot

        self._mesh, self._vote = run.mesh, None
        self._saving = Saving(
            run,
            environment,
            start=self._start,
            copied=copied,
            afterwards=lambda: prune(run.folder, keep, best_step),
        )
        self.newest_step = run.step
        self._blocked_s += time.perf_counter() - self._began_s

    def finished(self, progress: Progress = SILENT) -> list[Saved]:
        """Return the checkpoints that have become whole since the last call. The loop asks after
        every step.

        Raises: as `save`: what went wrong in the thread.
        """
        if self._saving is not None and self._all_ready(self._saving):
            self._advance(self._saving, progress)
        whole, self._whole = self._whole, []
        return whole

    def wait(self, progress: Progress = SILENT) -> None:
        """Wait until the checkpoint that is being written, if there is one, is whole.

        Raises: as `save`: what went wrong in the thread.
        """
        if self._saving is None:
            return
        with progress.task(f"Saving step {self._saving.step}"):
            while self._saving is not None:
                self._advance(self._saving, progress)

    def before_update(self) -> None:
        """Let the optimizer's step wait, on the GPU, until the weights are copied."""
        if self._saving is not None:
            self._copy.before_update()

    def close(self, progress: Progress = SILENT) -> None:
        """Wait for what is being written, without asking other ranks: the run ends by an error. A
        failure here is said, not raised.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            if saving.wait_alone():
                self._note(saving, progress)
        except Exception as error:  # the error that ends the run matters more
            progress.say(f"Step {saving.step} could not be saved: {error}")

    def _start(self, work: Work) -> Job:
        if not self._has_copy:
            return AtOnce(work)

        def copied_work() -> None:
            self._copy.wait()
            work()

        return InThread(copied_work)

    def _all_ready(self, saving: Saving) -> bool:
        """Say whether every rank has done what it is at; several ranks learn it a step late."""
        if self._mesh.world_size == 1:
            return saving.is_ready()
        before, self._vote = self._vote, Vote(self._mesh, saving.is_ready())
        return before is not None and before.count() == self._mesh.world_size

    def _advance(self, saving: Saving, progress: Progress) -> None:
        began_s = time.perf_counter()
        self._vote = None
        try:
            is_whole = saving.advance()
        except Exception:
            self._saving = None
            raise
        self._blocked_s += time.perf_counter() - began_s
        if is_whole:
            self._saving = None
            self._note(saving, progress)

    def _note(self, saving: Saving, progress: Progress) -> None:
        self._whole.append(
            Saved(saving.step, saving.path, time.perf_counter() - self._began_s, self._blocked_s)
        )
        for path in saving.aside:
            progress.say(set_aside_line(path))
