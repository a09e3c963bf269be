"""Times what a loop calls in torch and other packages: optimizers, saves, data loaders.

Every hook times the call that it replaces and passes everything through. Calls from other threads
are not timed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatout.measure.steps.lines import LineTotals, user_frame
from flatout.measure.steps.windows import replaced
from flatout.training.metrics.phases import PhaseTimer

Result = TypeVar("Result")

SAVES = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("safetensors.torch", "serialize_file"),
    ("lightning.fabric.plugins.io.torch_io", "_atomic_save"),
    ("lightning_fabric.plugins.io.torch_io", "_atomic_save"),
)
"""Functions that write checkpoints, by the module that calls them; only of imported modules."""
OWN_WORK = frozenset({None, "compute"})
"""Phases that a wait for data interrupts. In others, such as evaluation, it is part of them."""


class Hooks:
    """Enters and leaves the phases of a timer when the loop calls what they are about."""

    def __init__(self, timer: PhaseTimer) -> None:
        self.saves = LineTotals()
        """The lines of user code that save."""
        self._timer = timer

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time optimizers and saves inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self._timer.collecting_gc())
            stack.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
            for module, name in SAVES:
                owner = sys.modules.get(module)
                if owner is not None:
                    stack.enter_context(replaced(owner, name, self._saving))
            yield

    @contextmanager
    def loaders_installed(self) -> Iterator[None]:
        """Time the batches of every torch DataLoader inside the block, for loops of frameworks."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        with replaced(_BaseDataLoaderIter, "__next__", self._loading):
            yield

    def waits_count(self) -> bool:
        """Return whether a wait for data is one of its own now."""
        return self._is_ours() and self._timer.current in OWN_WORK

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._timer.thread

    def _before_optimizer(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Start the phase; a closure, which computes gradients, is not part of it."""
        if torch.compiler.is_compiling() or not self._is_ours():
            return None
        self._timer.enter("optimizer")
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": self._computing(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._computing(args[1]), *args[2:]), kwargs
        return None

    def _computing(self, closure: Callable[[], Result]) -> Callable[[], Result]:
        @functools.wraps(closure)
        def compute() -> Result:
            with self._timer.phase("compute"):
                return closure()

        return compute

    def _after_optimizer(self, *_: object) -> None:
        if (
            not torch.compiler.is_compiling()
            and self._is_ours()
            and self._timer.current == "optimizer"
        ):
            self._timer.leave()

    def _saving(self, plain: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(plain)
        def save(*args: Any, **kwargs: Any) -> Result:
            if not self._is_ours() or self._timer.current == "checkpoint":
                return plain(*args, **kwargs)
            before_s = self._timer.seconds["checkpoint"]
            try:
                with self._timer.phase("checkpoint"):
                    return plain(*args, **kwargs)
            finally:
                line = user_frame(sys._getframe(1))
                if line is not None:
                    self.saves.add("save", line, self._timer.seconds["checkpoint"] - before_s)

        return save

    def _loading(self, plain: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(plain)
        def load(iterator: Any) -> Result:
            if not self.waits_count():
                return plain(iterator)
            with self._timer.phase("data_wait"):
                return plain(iterator)

        return load
