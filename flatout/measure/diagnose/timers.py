"""Attaches timers to the parts of a run: its feed, its step, its optimizers, its readback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from flatout.assembly.run import Run
from flatout.data.load.feed import PrefetchFeed, StepBatch
from flatout.measure.instruments.phase_timer import PhaseTimer
from flatout.training.metrics.clocks import StepClock
from flatout.training.metrics.log import Log


class TimedFeed:
    """A run's feed whose waits are the phase `data_wait`; everything else passes through."""

    def __init__(self, feed: Any, timer: PhaseTimer) -> None:
        self._feed, self._timer = feed, timer
        self.last: StepBatch | None = None
        """The last batch."""

    def __next__(self) -> StepBatch:
        with self._timer.phase("data_wait"):
            self.last = batch = cast(StepBatch, next(self._feed))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)


class FixedFeed:
    """A feed that returns one batch, which is on the device already, again and again."""

    def __init__(self, feed: TimedFeed, batch: StepBatch) -> None:
        self._feed, self._batch = feed, batch
        self.position = feed.position

    def __next__(self) -> StepBatch:
        return self._batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)


class TimedClock:
    """A run's step clock that times the step as `compute`, and what follows it as `logging`."""

    def __init__(self, clock: StepClock, timer: PhaseTimer) -> None:
        self._clock, self._timer = clock, timer

    def __enter__(self) -> None:
        self._timer.enter("compute")
        self._clock.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._clock.__exit__(*exception)
        self._timer.leave()
        self._timer.enter("logging")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


class KeptFigures:
    """A run's readback that also keeps the figures that it has read."""

    def __init__(self, readback: Any) -> None:
        self._readback = readback
        self.read: list[tuple[int, dict[str, float]]] = []
        """(step, figures), in order."""

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Forward the figures of `step`.

        Shapes: each value is 0-D.
        """
        self._readback.push(step, values, due=due)

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the figures that the run's readback has read."""
        found: list[tuple[int, dict[str, float]]] = self._readback.ready(flush=flush)
        self.read += found
        return found


def attach(run: Run, log: Log, timer: PhaseTimer) -> tuple[TimedFeed, KeptFigures]:
    """Attach timers to a run and its log; return its feed and its readback."""
    feed, figures = TimedFeed(run.feed, timer), KeptFigures(run.readback)
    run.feed = cast(PrefetchFeed, feed)
    run.readback = figures
    log.clock = cast(StepClock, TimedClock(log.clock, timer))
    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(lambda *_: timer.enter("optimizer"))
        optimizer.register_step_post_hook(lambda *_: timer.leave())
    return feed, figures
