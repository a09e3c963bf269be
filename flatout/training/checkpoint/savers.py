"""The baseline for saving a run's state: in the loop, which waits for the disk.

`flatout.speedups.async_checkpoints` writes the same files in a background thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flatout.assembly.run import Saved
from flatout.json_io import JsonObject
from flatout.progress import SILENT, Progress
from flatout.training.agreement import WRITING, together
from flatout.training.checkpoint.read_write import save
from flatout.training.checkpoint.retention import prune

if TYPE_CHECKING:
    from flatout.assembly.run import Run


class InTheLoop:
    """Saves while the loop waits."""

    def __init__(self) -> None:
        self.newest_step: int | None = None
        """The last step that this process saved."""
        self._saved: list[Saved] = []

    def reserve(self, run: Run, progress: Progress = SILENT) -> int:
        """Return 0: no memory is needed for a copy of the state."""
        return 0

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
        """Write the state, and delete the checkpoints that `prune` does not keep.

        Raises: RunFailed, CheckpointError, as `checkpoint.save`.
        """
        began_s = time.perf_counter()
        path = save(run, environment=environment, info=info, progress=progress)
        together(
            run.mesh,
            lambda: (
                prune(run.folder, keep, run.best_step, keep_every) if run.mesh.is_main else None
            ),
            WRITING,
        )
        seconds = time.perf_counter() - began_s
        self.newest_step = run.step
        self._saved.append(Saved(run.step, path, seconds, seconds))

    def finished(self, progress: Progress = SILENT) -> list[Saved]:
        """Return the checkpoints completed since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def wait(self, progress: Progress = SILENT) -> None:
        """Return at once: nothing is ever pending."""

    def before_update(self) -> None:
        """Return at once: there is no copy to wait for."""

    def close(self, progress: Progress = SILENT) -> None:
        """Return at once: nothing is ever pending."""

    def abandon(self) -> None:
        """Return at once: nothing is ever pending."""
