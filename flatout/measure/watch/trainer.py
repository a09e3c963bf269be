"""A callback for the Trainer of Hugging Face transformers, which watches its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flatout.errors import MissingPackage
from flatout.measure.watch.loop import LoopTimer


def trainer_callback(loop: LoopTimer, *, finish: Callable[[], None]) -> Any:
    """Return a callback that reports a Trainer's steps to `loop`, and its end to `finish`.

    Raises: MissingPackage without transformers.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingPackage(
            "transformers is not installed.", fix="Install it: `pip install transformers`."
        ) from error
    return type("WatchCallback", (TrainerEvents, TrainerCallback), {})(loop, finish)


class TrainerEvents:
    """Reports a Trainer's steps, logs, evaluations and saves; a base of the callback's class."""

    def __init__(self, loop: LoopTimer, finish: Callable[[], None]) -> None:
        self._loop, self._finish = loop, finish
        self._ahead: list[str] = []
        """What the Trainer does before its next step, in order; the first is running."""
        self._steps_before = 0
        """Steps of the run that a resumed Trainer continues."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Time the Trainer's loader, and note its model and the planned steps."""
        self._steps_before = state.global_step
        self._loop.learn(model=known.get("model"), planned_steps=state.max_steps)
        self._loop.time_loaders()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start a step."""
        self._end_all()
        self._loop.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step; the Trainer then logs, evaluates and saves, in this order."""
        self._loop.end_step()
        wanted = {
            "logging": control.should_log,
            "evaluation": control.should_evaluate,
            "checkpoint": control.should_save,
        }
        self._ahead = [phase for phase, is_due in wanted.items() if is_due]
        self._begin()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep what the Trainer logs."""
        figures = {
            name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))
        }
        self._loop.log(figures, step=state.global_step - self._steps_before)
        self._end("logging")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an evaluation."""
        self._end("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a save."""
        self._end("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say what was measured."""
        self._end_all()
        self._finish()

    def _begin(self) -> None:
        if self._ahead:
            self._loop.enter(self._ahead[0])

    def _end(self, phase: str) -> None:
        if self._ahead and self._ahead[0] == phase:
            self._loop.leave(self._ahead.pop(0))
            self._begin()

    def _end_all(self) -> None:
        if self._ahead:
            self._loop.leave(self._ahead[0])
            self._ahead = []
