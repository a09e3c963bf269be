"""Savers of a run's state: one waits for the disk, one writes a copy of the state in a thread."""

from __future__ import annotations

import time
from contextlib import nullcontext
from threading import Thread
from typing import TYPE_CHECKING

from flatout.assembly.run import Saved
from flatout.json_io import JsonObject
from flatout.progress import SILENT, Progress
from flatout.training.agreement import Vote
from flatout.training.checkpoint.host_copy import HostCopy, bytes_of
from flatout.training.checkpoint.job import Job, Saving, Work, at_once, do
from flatout.training.checkpoint.read_write import set_aside_line
from flatout.training.checkpoint.retention import prune
from flatout.training.checkpoint.snapshot import Snapshot, tensors_to_save

if TYPE_CHECKING:
    from flatout.assembly.run import Run


def in_background() -> Saver:
    """Return a saver that copies the state in the loop and writes it in a thread.

    Memory: one copy of this rank's share of the state, on the host, from `reserve` or the first
            save to the end of the run. If the host has no room for it, the loop writes the state.
    """
    return Saver(HostCopy())


def in_thread(work: Work) -> Job:
    """Start the work in a daemon thread: a process that exits does not wait for it.

    A half-written checkpoint does not count.
    """
    job = Job()
    Thread(target=do, args=(work, job), name="checkpoint", daemon=True).start()
    return job


class Saver:
    """Writes one checkpoint at a time: in the loop, or with a `copy` of the state in a thread.

    The files are the same. Every rank calls every method, at the same points.
    """

    def __init__(self, copy: HostCopy | None = None) -> None:
        self.newest_step: int | None = None
        """The last step that this process started to save."""
        self._copy = copy
        self._is_copied = False
        self._saving: Saving | None = None
        self._vote: Vote | None = None
        self._began_s = self._blocked_s = 0.0
        self._saved: list[Saved] = []

    def reserve(self, run: Run, progress: Progress = SILENT) -> int:
        """Allocate memory for the copy, so that the first save is as fast as later ones.

        On a CPU, training continues meanwhile.

        Returns: its bytes; 0 when the size is not known before the first step or the host has no
                 room: the first save then decides.
        """
        num_bytes = bytes_of(tensors_to_save(run) or ()) if self._copy else 0
        if self._copy is None or not num_bytes or not self._copy.has_room(num_bytes, run):
            return 0
        if run.mesh.device.type == "cpu":
            self._copy.make_room_beside(num_bytes)
        else:
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
        """Write the state or start to; once complete, delete what `prune` does not keep.

        Raises: RunFailed, CheckpointError, as `Saving` does, and for the previous save.
        """
        self.wait(progress)
        best_step = run.best_step  # as of this checkpoint: a later best is not on disk yet
        self._began_s, self._blocked_s = time.perf_counter(), 0.0

        def copied(snapshot: Snapshot) -> Snapshot:
            if self._copy is None:
                return snapshot
            self._is_copied = self._copy.has_room(bytes_of(snapshot.all_tensors), run)
            if self._is_copied:
                return self._copy.of(snapshot, run.mesh.device)
            progress.say(
                "The host has no memory for a copy of the state: "
                "the loop waits until it is written."
            )
            return snapshot

        task = nullcontext() if self._copy else progress.task(f"Saving step {run.step}")
        with task:
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
            while self._copy is None and self._saving is not None:
                self._advance(self._saving, progress)

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
        if self._saving is not None and self._copy is not None:
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
        copy = self._copy
        if copy is None or not self._is_copied:
            return at_once(work)

        def copied_work() -> None:
            copy.wait()
            work()

        return in_thread(copied_work)

    def _all_ready(self, saving: Saving) -> bool:
        """Return whether every rank has finished its stage; with several ranks, one step late."""
        if saving.mesh.world_size == 1:
            return saving.is_ready()
        before, self._vote = self._vote, Vote(saving.mesh, saving.is_ready())
        return before is not None and before.count() == saving.mesh.world_size

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
