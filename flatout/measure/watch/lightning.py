"""A callback for the Trainer of Lightning, which watches its loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flatout.errors import MissingPackage
from flatout.measure.watch.loop import LoopTimer


def lightning_callback(loop: LoopTimer, *, finish: Callable[[], None]) -> Any:
    """Return a callback that reports a Trainer's steps to `loop`, and its end to `finish`.

    Lightning has two names; the callback is for the one that is imported already.
    Raises: MissingPackage without Lightning.
    """
    return _callback_class()(loop, finish)


def _callback_class() -> type[Any]:
    """Return the class for the package that the program uses."""
    try:
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            from lightning.pytorch import Callback
    except ImportError as error:
        raise MissingPackage(
            "Lightning is not installed.", fix="Install it: `pip install lightning`."
        ) from error
    return type("WatchCallback", (LightningEvents, Callback), {})


class LightningEvents:
    """Reports the steps, evaluations and the end of a Trainer; a base of the callback's class."""

    def __init__(self, loop: LoopTimer, finish: Callable[[], None]) -> None:
        self._loop, self._finish = loop, finish

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Time the Trainer's loader, and note its model and the planned steps."""
        steps = trainer.estimated_stepping_batches
        planned = int(steps) if steps not in (-1, float("inf")) else None
        self._loop.learn(model=module, planned_steps=planned)
        self._loop.time_loaders()

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
        """Say what was measured."""
        self._finish()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Say what was measured until an error."""
        self._loop.end_step(exception)
        self._finish()
