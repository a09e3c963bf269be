"""Save a run's state in a background thread, from a copy that the loop makes."""

from __future__ import annotations

import time
from threading import Thread
from typing import TYPE_CHECKING

from flatout.assembly.run import Saved
from flatout.json_io import JsonObject
from flatout.parallel.mesh import Mesh
from flatout.progress import SILENT, Progress
from flatout.speedups.async_checkpoints.host_copy import HostCopy, bytes_of
from flatout.training.agreement import Vote
from flatout.training.checkpoint.job import Job, Saving, Work, at_once, do
from flatout.training.checkpoint.read_write import set_aside_line
from flatout.training.checkpoint.retention import prune
from flatout.training.checkpoint.snapshot import Snapshot, tensors_to_save

if TYPE_CHECKING:
    from flatout.assembly.run import Run


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
