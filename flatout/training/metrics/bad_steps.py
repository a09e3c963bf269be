"""Reads back which steps were bad, so that their updates were skipped: at once on a CPU, one step
late on a GPU, and on every rank alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flatout.storage.json_io import JsonObject
from flatout.training.metrics.readback import DelayedReadback

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.data.load.loader import StepBatch
    from flatout.training.step import StepResult


class BadStep(NamedTuple):
    """A step whose update was skipped."""

    step: int
    start: int
    """Position of its data, over all ranks."""
    stop: int
    """Position after its data."""
    in_a_row: int
    """Bad steps up to this one without a good one between them."""
    loss: float
    grad_norm: float

    @property
    def reason(self) -> str:
        """What is wrong with it, in a few words."""
        if not math.isfinite(self.loss):
            return f"the training loss is {self.loss}"
        return f"the gradient norm is {self.grad_norm}"

    def event(self) -> JsonObject:
        """Return the fields of its event."""
        return {
            "step": self.step,
            "reason": self.reason,
            "in_a_row": self.in_a_row,
            "position": [self.start, self.stop],
        }

    def to_dict(self) -> JsonObject:
        """Return it as values for JSON, which has no infinity."""
        numbers = {"loss": self.loss, "grad_norm": self.grad_norm}
        return self.event() | {
            name: value if math.isfinite(value) else str(value) for name, value in numbers.items()
        }


class BadSteps:
    """The bad steps since the last good one."""

    def __init__(self) -> None:
        self._readback = DelayedReadback()
        self._positions: dict[int, tuple[int, int]] = {}
        self._at_once = False
        self.last: list[BadStep] = []
        """The last bad steps in a row that this process has taken. Empty after a good one."""

    @property
    def in_a_row(self) -> int:
        """Bad steps since the last good one, including those before a resume."""
        return self.last[-1].in_a_row if self.last else 0

    def push(self, run: Run, batch: StepBatch, result: StepResult) -> None:
        """Start reading back whether the step that was just queued is bad."""
        streak = run.guard.streak
        self._at_once = streak.is_cpu
        if self._at_once and not streak:
            self.last.clear()
            return
        figures = {
            "in_a_row": streak,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "num_valid": result.num_valid,
        }
        self._readback.push(run.step, figures, due=True)
        self._positions[run.step] = batch.start, batch.position

    def ready(self, *, flush: bool) -> list[BadStep]:
        """Return the bad steps that are known since the last call. With `flush`, wait for all."""
        found = []
        for step, figures in self._readback.ready(flush=flush or self._at_once):
            start, stop = self._positions.pop(step)
            in_a_row = int(figures.pop("in_a_row"))
            if not figures.pop("num_valid"):  # a step without a target is neither
                continue
            if in_a_row:
                self.last.append(BadStep(step, start, stop, in_a_row, **figures))
                found.append(self.last[-1])
            else:
                self.last.clear()
        return found
