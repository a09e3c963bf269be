"""Measures of flatout's own training what other loops do not show: its phases, saves, evaluations.

The training loop is found among the callers of its optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self, cast

from flatout.data.load.loader import PrefetchLoader, StepBatch
from flatout.errors import DiskFull
from flatout.measure.attach.stages import Stages
from flatout.training.evaluation import score
from flatout.training.loop import Session, fit
from flatout.training.saving import environment_of

SCORED_ROWS = 8
"""Micro-batches of the trial evaluation."""


class FixedLoader:
    """A data loader that returns one batch, which is on the device already, again and again."""

    def __init__(self, loader: Any) -> None:
        self.position, self.steps_per_epoch = loader.position, loader.steps_per_epoch
        self.data_at, self._batch = loader.data_at, next(loader)

    def __next__(self) -> StepBatch:
        return cast(StepBatch, self._batch)

    def seek(self, position: int) -> None:
        """Do nothing: every position has the same batch."""


class FlatoutsRun:
    """A run of flatout in this process."""

    def __init__(
        self, session: Session, stages: Stages, on_phase: Callable[[str | None], object]
    ) -> None:
        self._session, self._stages = session, stages
        self._own_steps: int | None = None
        session.log.clock.timer.on_change = on_phase

    @classmethod
    def above(
        cls,
        frame: FrameType | None,
        stages: Stages,
        on_phase: Callable[[str | None], object],
    ) -> Self | None:
        """Return the run whose loop is among the callers of a frame. None when there is none.

        `on_phase` is called with the name of a phase that starts, and with None when one ends.
        """
        while frame is not None and frame.f_code is not fit.__code__:
            frame = frame.f_back
        return None if frame is None else cls(frame.f_locals["session"], stages, on_phase)

    @contextmanager
    def fixed_data(self) -> Iterator[None]:
        """Give every step inside the block the same batch. Only for a trial."""
        run = self._session.run
        self._own_steps, loader = self._own_steps or run.step, run.loader
        run.loader = cast(PrefetchLoader, FixedLoader(loader))
        try:
            yield
        finally:
            run.loader = loader

    def once(self) -> dict[str, float]:
        """Save and evaluate twice, and return what the second of each takes, as `Answer.once`.

        Only for a trial: the saves are of steps that were not taken, and replace earlier ones.
        """
        run, log, found = self._session.run, self._session.log, dict[str, float]()
        log.write_pending()
        found["steps"] = self._own_steps or run.step
        most = SCORED_ROWS * run.rows_per_device * run.config.data.seq_len
        for _ in range(2):  # the second is like those after it
            start_s = time.perf_counter()
            scored = score(run, max_tokens=most)
            if scored is not None:
                found["score"] = (time.perf_counter() - start_s) / max(scored.tokens, 1)
        try:
            for _ in range(2):
                run.step += 1  # a step is saved once
                start_s = time.perf_counter()
                run.saver.save(run, environment=environment_of(run), keep=1)
                found["save"] = time.perf_counter() - start_s
                run.saver.wait()
        except (DiskFull, OSError) as error:
            self._stages.notes.append(f"A save could not be measured: {error}")
        return found
