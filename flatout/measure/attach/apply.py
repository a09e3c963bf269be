"""Applies changes in the process of a script: of what it constructs, and of what it then has."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from flatout.measure.attach.guard import guarded, replace
from flatout.measure.attach.items import keeping_items
from flatout.measure.attach.sites import Sites
from flatout.measure.attach.switches import Script, setting, switched
from flatout.measure.scripts.changes import edit_of


class Models:
    """The outermost modules with weights that a script calls with gradients in its first step."""

    def __init__(self) -> None:
        self.found: list[nn.Module] = []
        self.receivers: list[Callable[[nn.Module], object]] = []
        """Called with every model before its first call."""
        self._has_ended = False
        self._plain: Any = nn.Module.__call__
        self._call = replace(nn.Module, "__call__", self._noting)
        register_optimizer_step_post_hook(self._end)

    def _noting(self, plain: Any) -> Any:
        """Return a `__call__` that notes a model, and is not there for the modules in it.

        torch.compile warns of global hooks, and compiles again when a function has changed.
        """

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self._has_ended or torch.compiler.is_compiling():
                return plain(module, *args, **kwargs)
            current, nn.Module.__call__ = nn.Module.__call__, plain  # type: ignore[method-assign]
            try:
                guarded(self._note)(module)
                return plain(module, *args, **kwargs)
            finally:
                nn.Module.__call__ = current  # type: ignore[method-assign]

        return call

    def _note(self, module: nn.Module) -> None:
        is_new = all(module is not each for each in self.found)
        # no loss and no transform of images has weights
        is_trained = module.training and any(one.requires_grad for one in module.parameters())
        if is_new and torch.is_grad_enabled() and is_trained:
            self.found.append(module)
            for receive in self.receivers:
                receive(module)

    def _end(self, *_: object) -> None:
        self._has_ended = True
        if nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._plain  # type: ignore[method-assign]


def apply(names: Sequence[str]) -> dict[str, str]:
    """Apply changes, and return the dict that gets those which fail, with the reason.

    A model has them before its first call, everything else from now on.
    """
    if not names:
        return {}
    failed, made, sites, models = dict[str, str](), ExitStack(), Sites(), Models()
    sites.install()
    atexit.register(guarded(made.close))  # what keeps it until then

    def make(name: str, *of: nn.Module) -> None:
        try:
            made.enter_context(switched(name, Script(of, None, sites)))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"

    for name in names:
        edit = edit_of(name)
        owners = [getattr(torch.optim, kind) for kind in edit.only]
        if edit.lines or edit.around:
            models.receivers.append(partial(make, name))
        elif edit.at == "items":
            replace(DataLoader, "__init__", keeping_items)
        elif edit.at in ("loader", "optimizer"):
            for owner in owners or [DataLoader]:
                fail = partial(failed.__setitem__, name)
                replace(owner, "__init__", partial(setting, edit, fail))
        elif not edit.environment:
            make(name)
    return failed


def keep_linked(copy: str) -> None:
    """Keep a file of the user to which a link in a copy leads: what is written is a new file.

    Raises: PermissionError, in the script, when the file would be changed instead.
    """

    def before_writing(name: Any, flags: int = os.O_TRUNC) -> None:
        if not isinstance(name, str | os.PathLike):
            return
        path = os.path.abspath(name)
        if not (os.path.islink(path) and path.startswith(copy)):
            return
        if not flags & os.O_TRUNC:
            raise PermissionError(f"trials must not change {path}, which links to the original")
        os.unlink(path)

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            before_writing(args[0], args[2])

    def saving(plain: Callable[..., Any]) -> Callable[..., Any]:
        def save(content: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            before_writing(path)  # it is written outside of Python
            return plain(content, path, *args, **kwargs)

        return save

    def on_step(*_: object) -> None:
        safetensors = sys.modules.get("safetensors.torch")
        if safetensors is not None and not hasattr(safetensors.serialize_file, "__wrapped__"):
            replace(safetensors, "serialize_file", saving)

    sys.addaudithook(on_event)
    replace(torch, "save", saving)
    register_optimizer_step_post_hook(on_step)
