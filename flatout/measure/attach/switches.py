"""Makes changes of a running script between two of its steps, and undoes them."""

from __future__ import annotations

import ast
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from flatout.hardware.machine import probe
from flatout.measure.attach.guard import replaced
from flatout.measure.attach.items import Items
from flatout.measure.attach.sites import CALLS, Sites
from flatout.measure.scripts.changes import CHANGES, edit_of
from flatout.measure.scripts.patch import Edit


@dataclass
class Script:
    """What a running script has that changes are about."""

    models: Sequence[nn.Module]
    """The outermost ones that are trained."""
    optimizer: Any
    """The one whose steps are those of the loop."""
    sites: Sites
    read: tuple[Callable[[], Any], Any] | None = None
    """As `Hooks.read`."""

    @cached_property
    def items(self) -> Items:
        """The items of the dataset."""
        assert self.read is not None
        return Items(self.read[0](), self.read[1])


@contextmanager
def switched(name: str, script: Script) -> Iterator[None]:
    """Make a change inside the block.

    Raises: NotKept, and whatever its lines raise.
    """
    edit, undo = edit_of(name), CHANGES[name].undo
    with ExitStack() as stack:
        for model in script.models if edit.lines or edit.around else ():
            if edit.around:
                stack.enter_context(in_bf16(model))
                continue
            names = {"model": model, "torch": torch, "thresholds": gc.get_threshold()}
            execute(edit.lines, names)
            stack.callback(execute, undo, names)
        if edit.at == "optimizer":
            stack.enter_context(fused(script.optimizer))
        elif edit.at == "items":
            owner = type(script.items.dataset)
            stack.enter_context(replaced(owner, "__getitem__", script.items.keeping))
        elif edit.at == "anomaly":
            stack.callback(torch.set_anomaly_enabled, torch.is_anomaly_enabled())
            torch.set_anomaly_enabled(False)
            stack.enter_context(
                replaced(torch, "set_anomaly_enabled", lambda on: lambda *_: on(False))
            )
        elif edit.remove:
            script.sites.ignored.add(edit.at)
            stack.callback(script.sites.ignored.discard, edit.at)
        elif edit.keywords:
            for owner, function in CALLS[edit.at]:
                stack.enter_context(replaced(owner, function, partial(setting, edit, print)))
        if name == "threads":
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(probe().cores)
        yield


@contextmanager
def fused(optimizer: Any) -> Iterator[None]:
    """Let an optimizer update all weights in one kernel, for which it counts on their device."""
    groups = [(group, group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]
    counts = [
        (kept, weights.device, kept["step"].device)
        for weights, kept in optimizer.state.items()
        if isinstance(kept.get("step"), Tensor)
    ]
    for group, *_ in groups:
        group.update(fused=True, foreach=False)
    for kept, device, _ in counts:
        kept["step"] = kept["step"].to(device)
    try:
        yield
    finally:
        for group, is_fused, foreach in groups:
            group.update(fused=is_fused, foreach=foreach)
        for kept, _, device in counts:
            kept["step"] = kept["step"].to(device)


@contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Run the forward pass of a model in bf16 autocast, with results in fp32.

    The class's method is replaced, since a model may be copied and pickled.
    """
    device = next(model.parameters()).device.type

    def in_autocast(plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not model:
                return plain(self, *args, **kwargs)
            with torch.autocast(device, torch.bfloat16):
                return in_fp32(plain(self, *args, **kwargs))

        return forward

    def in_fp32(out: Any) -> Any:
        if torch.is_tensor(out) and out.dtype == torch.bfloat16:
            return out.float()
        return type(out)(map(in_fp32, out)) if type(out) in (tuple, list) else out

    with replaced(type(model), "forward", in_autocast):
        yield


def execute(lines: Sequence[str], names: dict[str, Any]) -> None:
    """Execute lines of an edit for the model among the names, which keep what they define."""
    text = "\n".join(lines).replace("{model}", "model").replace("{torch}", "torch")
    exec(compile(text, __file__, "exec"), names)  # flatout's code


def setting(
    edit: Edit, failed: Callable[[str], object], plain: Callable[..., Any]
) -> Callable[..., Any]:
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
