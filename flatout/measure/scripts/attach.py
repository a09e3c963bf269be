"""Attaches to a training script inside its own process, through torch's global hooks.

A step lasts from one step of the script's first optimizer to the next, so that accumulation and
further optimizers are part of it. Everything that a step does is measured by `flatout.watch`'s own
timer; what is found goes to a file, after which the script ends, or runs on unmeasured.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.files import write_text
from flatout.measure.scripts.apply import Models, apply
from flatout.measure.scripts.request import Answer, Request
from flatout.measure.scripts.sites import Sites
from flatout.measure.scripts.trial import Trial, facts_of
from flatout.measure.watch.loop import LoopTimer, Settings

MIN_MEASURED = 5
"""Fewest ordinary steps of a measurement."""


class Attachment:
    """Follows the script of this process by the calls that it makes in torch."""

    def __init__(self, request: Request, models: Models) -> None:
        self._request, self._models = request, models
        self._loop = LoopTimer(Settings(), at_exit=self.answer)
        self._optimizer: int | None = None
        """Identity of the optimizer whose steps end the script's."""
        self._model: nn.Module | None = None
        self._thread: int | None = None
        self._has_answered = self._has_loss = False
        self._sites = Sites()
        self._sites.install()
        self._calls = register_module_forward_pre_hook(self._on_any_call)
        register_optimizer_step_post_hook(self._on_optimizer_step)
        torch.Tensor.backward = self._noting_losses(torch.Tensor.backward)  # type: ignore[method-assign]

    def answer(self) -> None:
        """Write what was measured, once; only the process that takes the steps writes."""
        if self._has_answered or self._loop.rank:
            return
        self._has_answered = True
        evidence, problem = None, None
        try:
            evidence = self._loop.evidence()
        except Exception as error:
            problem = str(error)
        self._loop.close()
        sites = self._sites.found(self._model)
        found = Answer(
            evidence=evidence,
            problem=problem,
            steps=self._loop.steps,
            sites=sites,
            facts=facts_of(self._models, tuple({site.kind for site in sites})),
        )
        write_text(Path(self._request.answer), found.model_dump_json())

    def _on_any_call(self, module: nn.Module, _: Any) -> None:
        """Keep the largest module that is called with gradients before the first step ends."""
        if torch.is_grad_enabled() and (self._model is None or _is_part(self._model, module)):
            self._model = module

    def _on_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        """End a step and start the next, or end the measurement."""
        if self._has_answered or torch.compiler.is_compiling():
            return
        if self._optimizer is None:
            self._optimizer, self._thread = id(optimizer), threading.get_ident()
            self._calls.remove()
            self._loop.learn(model=self._model, planned_steps=None)
            if self._model is not None:
                self._model.register_forward_pre_hook(self._on_model_call)
                nn.Module.train = self._noting_modes(nn.Module.train)  # type: ignore[method-assign]
            self._loop.begin_step()
            return
        if id(optimizer) != self._optimizer:
            return
        self._has_loss = False
        self._loop.leave("evaluation")
        self._loop.end_step()
        if not self._is_enough():
            self._loop.begin_step()
            return
        self.answer()
        if not self._request.to_the_end:
            with suppress(Exception):
                sys.stdout.flush()
            raise SystemExit(0)

    def _is_enough(self) -> bool:
        windows = self._loop.windows
        if self._request.steps is not None:
            return self._loop.steps >= self._request.steps
        if windows is None or windows.name != "ordinary" or windows.sampled_steps == 0:
            return False
        done = windows.ordinary
        has_special = windows.special.steps > 0 or windows.has_compiled
        return has_special and done.steps >= MIN_MEASURED and done.seconds >= self._request.seconds

    def _on_model_call(self, _: nn.Module, __: Any) -> None:
        """Divide training from evaluation, which has no gradients."""
        if threading.get_ident() == self._thread:
            self._set_evaluating(not torch.is_grad_enabled())

    def _noting_modes(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def train(module: nn.Module, mode: bool = True) -> Any:
            if module is self._model and threading.get_ident() == self._thread:
                self._set_evaluating(not mode)
            return plain(module, mode)

        return train

    def _set_evaluating(self, is_evaluating: bool) -> None:
        windows = self._loop.windows
        if self._has_answered or windows is None:
            return
        is_inside = windows.timer.current == "evaluation"
        if is_evaluating and not is_inside:
            self._loop.enter("evaluation")
        elif is_inside and not is_evaluating:
            self._loop.leave("evaluation")

    def _noting_losses(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not (self._has_answered or self._has_loss) and loss.numel() == 1:
                self._has_loss = True
                self._loop.log({"loss": loss}, step=self._loop.steps + 1)
            return plain(loss, *args, **kwargs)

        return backward


def _is_part(part: nn.Module, whole: nn.Module) -> bool:
    """Return whether a module is inside another one."""
    return part is not whole and any(part is each for each in whole.modules())


def attach(path: str) -> None:
    """Change and follow this process as the request in a file says."""
    request = Request.model_validate_json(Path(path).read_text(encoding="utf-8"))
    models = Models()
    failed = apply(request.changes, models)
    if request.timing is not None:
        Trial(request, failed)
    elif request.measures:
        Attachment(request, models)
