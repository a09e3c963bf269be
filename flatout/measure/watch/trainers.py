"""Callbacks for the Trainers of Hugging Face and of Lightning, which watch their loops.

Lightning has two names. Its callback is for the one that is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from flatout.errors import MissingPackage
from flatout.measure.watch.loop import LoopTimer


def callback(framework: str, loop: LoopTimer, finish: Callable[[], None]) -> Any:
    """Return a callback that reports a Trainer's steps to `loop`, and its end to `finish`.

    Raises: MissingPackage without the framework, which is `transformers` or `lightning`.
    """
    events: type[Any] = LightningEvents
    try:
        if framework == "transformers":
            from transformers import TrainerCallback as Callback

            events = TrainerEvents
        elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            from lightning.pytorch import Callback
    except ImportError as error:
        name = framework.capitalize() if framework == "lightning" else framework
        raise MissingPackage(
            f"{name} is not installed.", fix=f"Install it: `pip install {framework}`."
        ) from error
    return type("WatchCallback", (events, Callback), {})(loop, finish)


class LightningEvents:
    """Reports the steps, evaluations and the end of a Trainer. A base of the callback's class."""

    def __init__(self, loop: LoopTimer, finish: Callable[[], None]) -> None:
        self._loop, self._finish = loop, finish

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Time the Trainer's loader, and note its model and the planned steps."""
        steps = trainer.estimated_stepping_batches
        planned = int(steps) if steps not in (-1, float("inf")) else None
        self._loop.learn(model=module, planned_steps=planned)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        """Start a step."""
        self._loop.begin_step()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
    ) -> None:
        """End a step, and keep what the module logged."""
        self._loop.end_step()
        if trainer.logged_metrics:
            self._loop.log(trainer.logged_metrics, step=self._loop.steps + 1)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Start an evaluation."""
        self._loop.enter("evaluation")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """End an evaluation."""
        self._loop.leave("evaluation")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Show what was measured."""
        self._finish()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Show what was measured until an error."""
        self._loop.end_step(exception)
        self._finish()


class TrainerEvents:
    """Reports a Trainer's steps, logs, evaluations and saves. A base of the callback's class."""

    def __init__(self, loop: LoopTimer, finish: Callable[[], None]) -> None:
        self._loop, self._finish = loop, finish
        self._ahead: list[str] = []
        """What the Trainer does before its next step, in order. The first is running."""
        self._steps_before = 0
        """Steps of the run that a resumed Trainer continues."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Time the Trainer's loader, and note its model and the planned steps."""
        self._steps_before = state.global_step
        self._loop.learn(model=known.get("model"), planned_steps=state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start a step."""
        self._end_all()
        self._loop.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step. The Trainer then logs, evaluates and saves, in this order."""
        self._loop.end_step()
        wanted = {
            "logging": control.should_log,
            "evaluation": control.should_evaluate,
            "checkpoint": control.should_save,
        }
        self._ahead = [phase for phase, is_due in wanted.items() if is_due]
        if self._ahead:
            self._loop.enter(self._ahead[0])

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
        """Show what was measured."""
        self._end_all()
        self._finish()

    def _end(self, phase: str) -> None:
        """End a phase, if it is the one that is running, and start the next."""
        if self._ahead[:1] == [phase]:
            self._loop.leave(self._ahead.pop(0))
            if self._ahead:
                self._loop.enter(self._ahead[0])

    def _end_all(self) -> None:
        if self._ahead:
            self._loop.leave(self._ahead[0])
            self._ahead = []
