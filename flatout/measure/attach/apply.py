"""Applies changes inside the process of a script: makes the edits of its files on its objects.

Everything happens before the script's own code runs, or when a model is called for the first time.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import IterableDataset

from flatout.config.registry import is_user_code
from flatout.hardware.machine import probe
from flatout.measure.attach.guard import guarded
from flatout.measure.attach.sites import CALLS
from flatout.measure.scripts.changes import edit_of
from flatout.measure.scripts.patch import Edit

Failed = Callable[[str], object]


class Models:
    """The outermost modules with weights that a script calls with gradients in its first step."""

    def __init__(self) -> None:
        self.found: list[nn.Module] = []
        self.receivers: list[Callable[[nn.Module], object]] = []
        """Called with every model before its first call."""
        self._has_ended = False
        self._plain: Any = nn.Module.__call__
        nn.Module.__call__ = self._call = self._noting()  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._end)

    def _noting(self) -> Any:
        """Return a `__call__` that notes a model, and is not there for the modules in it.

        torch.compile warns of global hooks, and compiles again when a function has changed.
        """
        plain = self._plain

        @functools.wraps(plain)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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


def apply(names: Sequence[str], models: Models) -> dict[str, str]:
    """Apply changes, and return the dict that gets those which fail, with the reason."""
    failed: dict[str, str] = {}
    for name in names:
        edit, fail = edit_of(name), partial(failed.__setitem__, name)
        owners = [(getattr(torch.optim, kind), "__init__") for kind in edit.only]
        how = ignoring if edit.remove else partial(setting, edit, fail)
        if name == "bf16":
            models.receivers.append(run_in_bf16)
        elif edit.lines:
            models.receivers.append(partial(run_lines, edit, fail))
        elif name == "threads":
            torch.set_num_threads(probe().cores)
        if name == "no-anomaly":  # it is switched on by torch's own code
            replace(torch, "set_anomaly_enabled", lambda plain: lambda *_: plain(False))
            continue
        for owner, function in owners or CALLS.get(edit.at, ()):
            replace(owner, function, how)
    return failed


def run_lines(edit: Edit, failed: Failed, model: nn.Module) -> None:
    """Run the lines of an edit for a model."""
    text = "\n".join(edit.lines).replace("{model}", "model").replace("{torch}", "torch")
    try:
        exec(compile(text, __file__, "exec"), {"model": model, "torch": torch})  # flatout's code
    except Exception as error:
        number = traceback.extract_tb(error.__traceback__)[1].lineno or 1
        where = f"in `{edit.lines[number - 1].strip()}`"
        failed(f"{type(error).__name__}: {str(error) or where}")


def run_in_bf16(model: nn.Module) -> None:
    """Run the forward pass of a model in bf16 autocast, with results in fp32.

    The class's method is replaced, since a model may be copied and pickled.
    """
    plain, device = type(model).forward, next(model.parameters()).device.type

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not model:
            return plain(self, *args, **kwargs)
        with torch.autocast(device, torch.bfloat16):
            return in_fp32(plain(self, *args, **kwargs))

    def in_fp32(out: Any) -> Any:
        if torch.is_tensor(out) and out.dtype == torch.bfloat16:
            return out.float()
        return type(out)(map(in_fp32, out)) if type(out) in (tuple, list) else out

    type(model).forward = forward


def replace(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function of a class or a module for the life of this process."""
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(wrap(plain)))


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


def ignoring(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ignores the user's own calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        is_users = is_user_code(sys._getframe(1).f_code.co_filename)
        return None if is_users else plain(*args, **kwargs)

    return call


def setting(edit: Edit, failed: Failed, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that sets arguments, except for a dataset that is read in one order.

    A loader keeps the workers that it has.
    """
    signature = inspect.signature(plain)
    values = {name: ast.literal_eval(text) for name, text in edit.keywords.items()}

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if isinstance(given.get("dataset"), IterableDataset):
            return plain(*args, **kwargs)
        ours = values
        if "num_workers" in ours:
            ours = ours | {"num_workers": max(ours["num_workers"], given.get("num_workers", 0))}
        try:
            return plain(**given | ours)
        except (RuntimeError, TypeError, ValueError) as error:
            failed(str(error))
            return plain(*args, **kwargs)

    return call
