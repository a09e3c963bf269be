"""Applies changes inside the process of a script: the function of each change's name.

Everything happens before the script's own code runs, or when a model is called for the first time.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset

from flatout.hardware import probe
from flatout.measure.scripts.changes import FUSED, GC_THRESHOLDS, num_workers
from flatout.registry import is_user_code

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Models:
    """The outermost modules that a script calls with gradients in its first step."""

    def __init__(self) -> None:
        self.found: list[nn.Module] = []
        self.in_autocast = False
        """Whether one of them was called in autocast."""
        self._receivers: list[Callable[[nn.Module], object]] = []
        self._has_ended = False
        self._plain: Any = nn.Module.__call__
        nn.Module.__call__ = self._call = self._noting()  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._end)

    def each(self, receive: Callable[[nn.Module], object]) -> None:
        """Call `receive` with every model before its first call."""
        self._receivers.append(receive)

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
                self._note(module)
                return plain(module, *args, **kwargs)
            finally:
                nn.Module.__call__ = current  # type: ignore[method-assign]

        return call

    def _note(self, module: nn.Module) -> None:
        is_new = all(module is not each for each in self.found)
        if is_new and torch.is_grad_enabled() and module.training:
            self.found.append(module)
            self.in_autocast |= torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
            for receive in self._receivers:
                receive(module)

    def _end(self, *_: object) -> None:
        self._has_ended = True
        if nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._plain  # type: ignore[method-assign]


def apply(names: Sequence[str], models: Models) -> dict[str, str]:
    """Apply changes, and return the dict that gets those which fail, with the reason."""
    failed: dict[str, str] = {}
    for name in names:
        function = globals().get(name.replace("-", "_"))
        if function is not None:  # otherwise it is done by the environment
            function(models, functools.partial(failed.__setitem__, name))
    return failed


Failed = Callable[[str], object]


def on_each(models: Models, failed: Failed, change: Callable[[Any], object]) -> None:
    """Change every model before its first call."""

    def changed(model: nn.Module) -> None:
        try:
            change(model)
        except Exception as error:
            failed(f"{type(error).__name__}: {error}")

    models.each(changed)


def replace(owner: Any, name: str, wrap: Wrap) -> None:
    """Replace a function of a class or a module for the life of this process."""
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(wrap(plain)))


def ignore(owner: Any, name: str) -> None:
    """Ignore the user's own calls of a function."""

    def quiet(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_users = is_user_code(sys._getframe(1).f_code.co_filename)
            return None if is_users else plain(*args, **kwargs)

        return call

    replace(owner, name, quiet)


def change_loaders(settings: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Change the arguments of DataLoaders over map-style datasets."""

    def changed(plain: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(plain)

        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs).arguments
            if not isinstance(given["dataset"], IterableDataset):
                plain(**{**given, **settings(given)})
            else:
                plain(self, *args, **kwargs)

        return construct

    replace(DataLoader, "__init__", changed)


def data_workers(*_: Any, **more: Any) -> None:
    """Read data in worker processes."""
    workers = {"num_workers": num_workers(), "persistent_workers": True, **more}
    change_loaders(lambda given: workers)


def prefetch(*_: Any) -> None:
    """Let workers read further ahead."""
    data_workers(prefetch_factor=8)


def pinned_memory(*_: Any) -> None:
    """Pin the memory of batches."""
    change_loaders(lambda given: {"pin_memory": True})


def no_anomaly(*_: Any) -> None:
    """Keep the detection of anomalies off."""
    replace(torch, "set_anomaly_enabled", lambda plain: lambda *_: plain(False))


def no_gc_collect(*_: Any) -> None:
    """Ignore gc.collect()."""
    ignore(gc, "collect")


def no_empty_cache(*_: Any) -> None:
    """Ignore torch.cuda.empty_cache()."""
    ignore(torch.cuda, "empty_cache")


def gc_thresholds(models: Models, failed: Failed) -> None:
    """Collect garbage rarely."""

    def rarely(_: object) -> None:
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    on_each(models, failed, rarely)


def threads(*_: Any) -> None:
    """Use a thread per core, whatever the script sets."""
    torch.set_num_threads(probe().cores)
    ignore(torch, "set_num_threads")


def zero_grad_none(*_: Any) -> None:
    """Free gradients."""

    def freeing(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *_, **__: plain(self, set_to_none=True)

    replace(torch.optim.Optimizer, "zero_grad", freeing)
    replace(nn.Module, "zero_grad", freeing)


def tf32(*_: Any) -> None:
    """Allow TF32."""
    torch.set_float32_matmul_precision("high")


def bf16(models: Models, failed: Failed) -> None:
    """Run the forward pass of every model in autocast; its class has other instances, too."""

    def change(model: Any) -> None:
        device = next(model.parameters()).device.type

        def in_bf16(plain: Callable[..., Any]) -> Callable[..., Any]:
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                if self is not model:
                    return plain(self, *args, **kwargs)
                with torch.autocast(device, torch.bfloat16):
                    out = plain(self, *args, **kwargs)
                is_bf16 = torch.is_tensor(out) and out.dtype == torch.bfloat16
                return out.float() if is_bf16 else out

            return forward

        replace(type(model), "forward", in_bf16)

    on_each(models, failed, change)


def sdpa(models: Models, failed: Failed) -> None:
    """Switch models of transformers to SDPA."""
    on_each(models, failed, lambda model: model.set_attn_implementation("sdpa"))


def channels_last(models: Models, failed: Failed) -> None:
    """Store the weights of convolutions with the channels last."""
    on_each(models, failed, lambda model: model.to(memory_format=torch.channels_last))


def cudnn_benchmark(*_: Any) -> None:
    """Let cuDNN measure."""
    torch.backends.cudnn.benchmark = True


def fused_optimizer(_: Models, failed: Failed) -> None:
    """Construct optimizers in their fused form."""

    def fused(plain: Callable[..., None]) -> Callable[..., None]:
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                plain(self, *args, **kwargs | {"fused": True, "foreach": None})
            except (RuntimeError, TypeError, ValueError) as error:
                failed(str(error))
                plain(self, *args, **kwargs)

        return construct

    for name in FUSED:
        replace(getattr(torch.optim, name), "__init__", fused)


def compile(models: Models, failed: Failed) -> None:
    """Compile every model."""
    on_each(models, failed, lambda model: model.compile())


def compile_each_block(models: Models, failed: Failed) -> None:
    """Compile the modules in every ModuleList."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for block in module:
                    block.compile()

    on_each(models, failed, change)


def deferred_item(*_: Any) -> None:
    """Return from the user's `.item()` the value of the same call one time before."""
    waiting: dict[object, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def deferred(plain: Callable[..., Any]) -> Callable[..., Any]:
        def item(tensor: torch.Tensor) -> Any:
            frame = sys._getframe(1)
            if not tensor.is_cuda or not is_user_code(frame.f_code.co_filename):
                return plain(tensor)
            place = frame.f_code, frame.f_lasti
            before = waiting.get(place)
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            waiting[place] = host, event
            if before is None:
                return plain(tensor)
            before[1].synchronize()
            return plain(before[0])

        return item

    replace(torch.Tensor, "item", deferred)
