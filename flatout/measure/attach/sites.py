"""Records the calls of a script that a patch may edit, with their exact positions in its files."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import weakref
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.anomaly_mode import detect_anomaly, set_detect_anomaly
from torch.optim import Optimizer
from torch.utils.data import DataLoader, SequentialSampler

from flatout.config.registry import is_user_code
from flatout.measure.attach.guard import guarded, replace
from flatout.measure.attach.request import Site

MOST_CALLERS = 4
"""Lines of user code, from the constructor of an optimizer outwards, that are searched for the
name of the model."""
WRAPPERS = ("flatout.", "torch._dynamo")
"""Modules whose functions may stand between a call and the recorded function."""

Position = tuple[int, int, int, int]

CALLS: dict[str, tuple[tuple[Any, str], ...]] = {
    "optimizer": ((Optimizer, "__init__"),),
    "loader": ((DataLoader, "__init__"),),
    "gc-collect": ((gc, "collect"),),
    "empty-cache": ((torch.cuda, "empty_cache"),),
    "threads": ((torch, "set_num_threads"),),
    "zero-grad": ((Optimizer, "zero_grad"), (nn.Module, "zero_grad")),
    "anomaly": ((detect_anomaly, "__init__"), (set_detect_anomaly, "__init__")),
}
"""The functions and methods that are recorded, by kind of `Site`."""


@dataclass
class _Calls:
    """The calls of one place."""

    site: Site
    code: CodeType
    """Kept, so that no other code gets its identity."""
    visible: set[tuple[str, weakref.ref[nn.Module]]] = field(default_factory=set)
    """Expressions there, and the modules that they name."""
    devices: dict[str, str] = field(default_factory=dict)
    """Expressions there of a type of device, and their values."""


class Sites:
    """The calls of this process that a patch may edit."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int, int], _Calls] = {}
        self._forward: dict[tuple[int, CodeType], Position] = {}
        """Where each frame of user code is in the first forward pass since the last backward.

        One that has ended may have had the identity of another one.
        """
        self.ignored: set[str] = set()
        """Kinds of calls of user code that do nothing."""

    def install(self) -> None:
        """Record from now on, until the process ends. The calls behave as before."""
        for kind, calls in CALLS.items():
            for owner, name in calls:
                self._watch(owner, name, kind)

    def found(self, model: nn.Module | None) -> tuple[Site, ...]:
        """Return the places in the order of their first calls.

        `model` is the root module, or None when it is not known.
        """
        sites = []
        for calls in [*self._calls.values()]:
            name = _name_of(model, calls)
            names = calls.site.names | ({"model": name} if name else {})
            weights = None if model is None else next(model.parameters(), None)
            here = weights is not None and weights.device.type
            devices = [one for one, kind in calls.devices.items() if kind == here]
            names |= {"device": min(devices, key=len)} if devices else {}
            sites.append(calls.site.model_copy(update={"names": names}))
        return tuple(sites)

    def note_forward(self, frame: FrameType | None) -> None:
        """Note where user code calls the model."""
        while frame is not None and (id(frame), frame.f_code) not in self._forward:
            if is_user_code(frame.f_code.co_filename):
                self._forward[id(frame), frame.f_code] = _position(frame)
            frame = frame.f_back

    def note_backward(self, frame: FrameType | None) -> None:
        """Record the place from the model's call to this one, in the function that makes both."""
        while frame is not None and (id(frame), frame.f_code) not in self._forward:
            frame = frame.f_back
        noted, self._forward = self._forward, {}
        if frame is None:
            return
        code, key = frame.f_code, ("loss", id(frame.f_code), frame.f_lasti)
        (line, _, column, _), (end_line, _, end_column, _) = (
            noted[id(frame), code],
            _position(frame),
        )
        if key not in self._calls:
            file = os.path.abspath(code.co_filename)
            site = Site(kind="loss", name="the loss", file=file, line=line, column=column,
                        end_line=end_line, end_column=end_column)  # fmt: skip
            self._calls[key] = _Calls(site, code)
            _look_around(frame, self._calls[key])

    def _watch(self, owner: Any, name: str, kind: str) -> None:
        """Replace a function by one that records its calls, if they do what an edit takes away."""

        @guarded
        def record(frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kind == "zero-grad" and all([*args[1:], *kwargs.values()]):  # as it is by default
                return
            if kind != "anomaly" or owner is detect_anomaly or torch.is_anomaly_enabled():
                receiver = next(iter(args), None) if isinstance(owner, type) else None
                self._record(kind, name, receiver, frame)

        def recorded(plain: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if kind in self.ignored and is_user_code(sys._getframe(1).f_code.co_filename):
                    return None
                result = plain(*args, **kwargs)
                if not torch.compiler.is_compiling():
                    record(sys._getframe(1), args, kwargs)
                return result

            return call

        replace(owner, name, recorded)

    def _record(self, kind: str, name: str, receiver: Any, frame: FrameType | None) -> None:
        """Note a call of a function, or of a method or constructor of `receiver`."""
        while frame is not None and _is_inside(frame, receiver):
            frame = frame.f_back
        is_direct = frame is not None and is_user_code(frame.f_code.co_filename)
        if not is_direct and kind not in ("optimizer", "loader"):
            return
        most = MOST_CALLERS if kind == "optimizer" else 1
        while frame is not None and most:
            code, here = frame.f_code, frame
            frame = frame.f_back
            if not is_user_code(code.co_filename):
                continue
            most -= 1
            key = (kind, id(code), here.f_lasti)
            if key not in self._calls:
                line, end_line, column, end_column = _position(here)
                site = Site(
                    kind=kind,
                    name=type(receiver).__name__ if name == "__init__" else name,
                    file=os.path.abspath(code.co_filename),
                    line=line,
                    end_line=end_line,
                    column=column,
                    end_column=end_column,
                    is_direct=is_direct,
                    parameters=_parameters(receiver, name),
                    is_in_order=isinstance(getattr(receiver, "sampler", None), SequentialSampler),
                )
                self._calls[key] = _Calls(site, code)
            if kind in ("optimizer", "caller"):
                _look_around(here, self._calls[key])
            kind, is_direct = "caller", False


def _position(frame: FrameType) -> Position:
    """Return where a frame is: line, end line, column and end column. 0 means not known."""
    positions = frame.f_code.co_positions()
    place = next(islice(positions, frame.f_lasti // 2, None), (None,) * 4)
    line, end_line, column, end_column = (number or 0 for number in place)
    return line or frame.f_lineno, end_line, column, end_column


def _is_inside(frame: FrameType, receiver: Any) -> bool:
    """Return whether a frame is part of a call itself: of a wrapper or a constructor."""
    code = frame.f_code
    if str(frame.f_globals.get("__name__")).startswith(WRAPPERS):
        return True
    if is_user_code(code.co_filename):  # whose locals are left alone
        constructors = {f"{one.__qualname__}.__init__" for one in type(receiver).__mro__}
        return code.co_qualname in constructors
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
    return receiver is not None and first is receiver


def _parameters(receiver: Any, name: str) -> tuple[str, ...]:
    """Return the parameters of a constructor or method up to a starred one. () for functions."""
    if receiver is None:
        return ()
    signature = inspect.signature(type(receiver) if name == "__init__" else getattr(receiver, name))
    named = takewhile(lambda one: not str(one).startswith("*"), signature.parameters.values())
    return tuple(one.name for one in named)


def seen_in(frame: FrameType) -> dict[str, Any]:
    """Return the variables that a frame can see."""
    own = frame.f_locals
    seen = frame.f_globals | dict(own)
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(own, dict)
    if is_copy and sys.getrefcount(own) <= 3:  # nor has the script called `locals()`
        own.clear()  # before Python 3.13, it would keep alive what the script deletes
    return seen


def _look_around(frame: FrameType, calls: _Calls) -> None:
    """Note the names of torch, of all modules and of tensors in fp32 that a frame can see."""
    seen = seen_in(frame)
    owner: Any = seen.get("self")
    attributes = dict(getattr(owner, "__dict__", {}))
    if issubclass(type(owner), nn.Module):
        attributes |= owner.named_children()
    seen |= {f"self.{name}": value for name, value in attributes.items()}
    for name, value in seen.items():
        if value is torch:
            calls.site.names["torch"] = name
        # the type, since a proxy may not want to be asked what it is an instance of
        if issubclass(type(value), nn.Module):
            calls.visible.add((name, weakref.ref(value)))
        if type(value) is torch.device:
            calls.devices[f"{name}.type"] = value.type
        elif type(value) is str and name.endswith("device_type"):
            calls.devices[name] = value
        elif type(value) is str and name.endswith("device"):
            calls.devices[f"{{torch}}.device({name}).type"] = value.partition(":")[0]
        is_float = type(value) is Tensor and value.dtype == torch.float32 and value.dim()
        if is_float and calls.site.kind == "loss":
            calls.site.floats.append(name)


def _name_of(model: nn.Module | None, calls: _Calls) -> str | None:
    """Return the shortest expression for a model, or for a module that it only wraps."""
    if model is None:
        return None
    weights = {*map(id, model.parameters())}
    found = []
    for name, reference in calls.visible:
        module = reference()
        if module is not None and {*map(id, module.parameters())} == weights:
            found.append((module is not model, len(name), name))
    return min(found)[-1] if found else None
