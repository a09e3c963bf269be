"""Facts of the model and the optimizer of a loop, and of the learning rates that it has taken."""

from __future__ import annotations

import linecache
import math
import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from flatout.config.registry import is_user_code
from flatout.measure.evidence import Evidence

MOST_RATES, SAME = 500, 1e-3
"""Learning rates that are kept, and how far factors are apart that are the same."""
LEAST_UNITS = 4
"""Fewest units of a layer that tell something."""
TINY_RATE = 1e-4
"""Share of the highest learning rate below which nothing is learned."""


class Rates:
    """The learning rates of the steps so far."""

    def __init__(self) -> None:
        self._highest = 0.0
        self._all: list[float] = []
        """Those of the first steps."""
        self.tiny = 0
        """Steps whose rate is next to nothing beside the highest one before."""

    def note(self, optimizer: Any) -> None:
        """Note that of a step."""
        rate = optimizer.param_groups[0].get("lr")
        if isinstance(rate, (int, float)):  # reading a tensor may wait for a GPU
            self._highest = max(rate, self._highest)
            self._all += [float(rate)] if len(self._all) < MOST_RATES else []
            self.tiny += rate < TINY_RATE * self._highest

    def halved_after(self) -> float | None:
        """Return the steps in which the rate halves, if it falls by equal factors, or None."""
        falls = [
            (step, now / before)
            for step, (before, now) in enumerate(pairwise(self._all))
            if 0 < now < before
        ]
        factors = [factor for _, factor in falls]
        if len(falls) < 2 or max(factors) - min(factors) > SAME * max(factors):
            return None
        steps = (falls[-1][0] - falls[0][0]) / (len(falls) - 1)
        return steps * math.log(0.5) / math.log(factors[0])


def moved(found: Evidence, seconds: float) -> dict[str, float | None]:
    """Return the phases of a CPU after moving seconds from other work to computation.

    Negative ones are lines in the forward pass that do not train: Python's part of it comes first.
    """
    other_s, compute_s, host_s = found.other_s, found.compute_s, found.host_s or 0.0
    if found.on_gpu or other_s is None or compute_s is None:
        return {}
    seconds = min(max(seconds, -compute_s - host_s), other_s)
    python_s = max(min(-seconds, host_s), 0.0)
    return {
        "other_s": other_s - seconds,
        "host_s": None if found.host_s is None else host_s - python_s,
        "compute_s": compute_s + seconds + python_s,
    }


def model_facts(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Return what changes of a model depend on, by the names in `Evidence`."""
    modules = [*model.modules()]
    largest = max(model.parameters(), key=Tensor.numel, default=torch.empty(0))
    groups = () if optimizer is None else optimizer.param_groups
    learning = {id(one) for group in groups if group.get("lr") for one in group["params"]}
    units = (one for one in model.named_parameters() if id(one[1]) in learning and one[1].dim() > 1)
    return {
        "dtype": str(largest.dtype).removeprefix("torch."),
        "equal_units": next((name for name, weights in units if are_equal(weights)), ""),
        "convolutions": any(
            isinstance(one, nn.Conv2d)
            and not one.weight.is_contiguous(memory_format=torch.channels_last)
            for one in modules
        ),
        "compiled": any(one._compiled_call_impl or hasattr(one, "_orig_mod") for one in modules),
        "eager_attention": any(
            getattr(getattr(one, "config", None), "_attn_implementation", "") == "eager"
            for one in modules
        ),
    }


def are_equal(weights: Tensor) -> bool:
    """Return whether all units of a layer have the same weights, which are not zero."""
    is_layer = len(weights) >= LEAST_UNITS and weights[0].numel() > 1
    is_plain = type(weights) is nn.Parameter and weights.device.type in ("cpu", "cuda")
    first = weights[:1] if is_layer and is_plain else None
    return first is not None and bool(first.any()) and bool((weights == first).all())


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """Return class, implementation and number of tensors of an optimizer."""
    if optimizer is None:
        return {}
    groups, way = optimizer.param_groups, None
    module = sys.modules.get(type(optimizer).__module__)
    file = getattr(module, "__file__", None) or "<"
    if is_user_code(file):
        way = "foreach" if "_foreach_" in "".join(linecache.getlines(file)) else "own"
    elif "foreach" in groups[0]:
        is_on_gpu = any(weights.is_cuda for group in groups for weights in group["params"])
        uses_foreach = groups[0].get("foreach")
        way = "foreach" if (is_on_gpu if uses_foreach is None else uses_foreach) else "for-loop"
        way = "fused" if groups[0].get("fused") else way
    tensors = sum(len(group["params"]) for group in groups)
    return {"optimizer": type(optimizer).__name__, "optimizer_way": way, "tensors": tensors}


def mode_matters(model: nn.Module) -> bool:
    """Return whether some module computes something else in evaluation mode."""
    return any(
        "training" in type(module).forward.__code__.co_names
        and all(getattr(module, name, True) != 0 for name in ("p", "dropout"))
        for module in model.modules()
        if hasattr(type(module).forward, "__code__")
    )


def called_by(frame: FrameType | None) -> tuple[nn.Module, tuple[Any, ...]] | None:
    """Return the outermost module whose `forward` calls this frame, and its arguments.

    Where the caller is no call of a module: then the script calls `forward` itself.
    """
    found = None
    while frame is not None:
        if frame.f_code.co_name == "forward":
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            owner, *given = [frame.f_locals.get(name) for name in names] or [None]
            if isinstance(owner, nn.Module) and any(isinstance(one, Tensor) for one in given):
                found = owner, tuple(given)
        frame = frame.f_back
    return found


def device_of(model: torch.nn.Module | None) -> str:
    """Return the device on which a loop computes."""
    weights = None if model is None else next(model.parameters(), None)
    if weights is not None:
        return str(weights.device) if weights.is_cuda else weights.device.type
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return "cuda" if used else "cpu"
