"""fp32 weights in two parts: a bfloat16, which products read directly, and its rounding error.

Under autocast a weight is rounded to bfloat16 for every product in every micro-batch, and the
rounded copy is kept for backward. Here the rounded weight is stored, with the other 16 bits beside
it for everything that needs them: the optimizer's update, rows of an embedding, a checkpoint. Only
the storage changes: all code sees an fp32 tensor with an fp32 gradient.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from flatout.models.language_model import LanguageModel
from flatout.ops import split_update
from flatout.ops.flag import assign_unless
from flatout.ops.split import join as join
from flatout.ops.split import split as split

JOINED_AT_ONCE = 2**24
"""Weights that an update of many tensors joins to fp32 at once: enough for full rate, 64 MiB."""

_aten = torch.ops.aten
_ELEMENTWISE_MOVES = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.select.int,
}
"""Operations that move elements without changing them."""


@cache
def _own_digest() -> str:
    files = (__file__, inspect.getfile(join))
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


class SplitTensor(Tensor):
    """An fp32 tensor that is stored as `high` (bfloat16) and `low` (int16).

    A conversion to bfloat16 returns `high`. Rows of an embedding are looked up in both parts and
    joined. Operations that only move elements act on both parts. torch's fused AdamW becomes one
    kernel on a GPU (`flatout.ops.split_update`). All other operations act on the joined fp32
    tensor, and their results are split again if they write in place.
    """

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> SplitTensor:
        """Return a tensor of these two parts."""
        tensor = Tensor._make_wrapper_subclass(
            cls,
            high.shape,
            strides=high.stride(),
            storage_offset=high.storage_offset(),
            dtype=torch.float32,
            device=high.device,
        )
        tensor.high, tensor.low = high, low
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the parts, for torch's compiler."""
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], _meta: None, _size: torch.Size, _stride: tuple[int, ...]
    ) -> SplitTensor:
        """Return the tensor of these parts."""
        return SplitTensor(parts["high"], parts["low"])

    def _stable_hash_for_caching(self) -> str:
        """Return a key for torch's compile cache that changes with the code of these files."""
        return _own_digest()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"SplitTensor({join(self.high, self.low)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one of torch's operations."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, SplitTensor):
            if func in _ELEMENTWISE_MOVES:
                return SplitTensor(*first._both(func, args, kwargs))
            if func is _aten.embedding.default:
                return join(*first._both(func, args, kwargs))
            if func is _aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
                if kwargs.get("device", first.device) == first.device:
                    return first.high.detach()
                return func(first.high, **kwargs)
            if func is _aten.copy_.default:
                first._assign(args[1])
                return first
        if isinstance(first, (list, tuple)) and func._schema.arguments[0].is_write:
            rest = _run_kernel(args, kwargs) if func is _aten._fused_adamw_.default else args
            for piece in _in_pieces(rest):
                _on_joined(func, piece, kwargs)
            return None
        return _on_joined(func, args, kwargs)

    def _both(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Run an operation on each part."""
        return func(self.high, *args[1:], **kwargs), func(self.low, *args[1:], **kwargs)

    def _assign(self, weight: Tensor) -> None:
        high, low = (
            (weight.high, weight.low)
            if isinstance(weight, SplitTensor)
            else split(weight.to(torch.float32))
        )
        self.high.copy_(high)
        self.low.copy_(low)


def whole(tensor: Tensor) -> Tensor:
    """Return a split tensor joined on the CPU, which needs no device memory; others unchanged.

    Shapes:  any.
    """
    if not isinstance(tensor, SplitTensor):
        return tensor
    return join(tensor.high.cpu(), tensor.low.cpu())


def decay_and_add(
    weights: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    kept: float,
    alpha: float,
    skip: Tensor | None = None,
) -> None:
    """Set each weight to kept * weight + alpha * step, in place; split weights in one pass.

    Every bit stays if `skip` is 1, which is read on the device.

    Shapes:  each pair of weight and step has one shape; weights are split or plain, and plain ones
             have the dtype of their steps; skip is 0-D.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    plain: list[tuple[Tensor, Tensor]] = []
    for weight, step in zip(weights, steps, strict=True):
        if not isinstance(weight, SplitTensor):
            plain.append((weight, step))
        elif split_update.fits(weight.high, weight.low):
            parts.append((weight.high, weight.low, step))
        else:
            moved = join(weight.high, weight.low).mul_(kept).add_(step, alpha=alpha)
            assign_unless(skip, [weight.high, weight.low], split(moved))
    if parts:
        split_update.decay_and_add(*_columns(parts), kept=kept, alpha=alpha, skip=skip)
    if plain:
        targets, added = _columns(plain)
        moved_weights = torch._foreach_mul(targets, kept)
        torch._foreach_add_(moved_weights, added, alpha=alpha)
        assign_unless(skip, targets, moved_weights)


def _run_kernel(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Run `split_update.adamw` on the weights that it supports, and return the other arguments.

    The arguments are those of torch's fused AdamW.
    """
    weights, gradients, exp_avgs, exp_avg_sqs, _, steps = args
    if kwargs["amsgrad"] or kwargs["maximize"] or kwargs.get("grad_scale") is not None:
        return args
    rows = list(zip(weights, gradients, exp_avgs, exp_avg_sqs, steps, strict=True))
    fit = [
        isinstance(w, SplitTensor)
        and g.dtype == torch.float32
        and s.device == w.device
        and split_update.fits(w.high, w.low, m, v)
        for w, g, m, v, s in rows
    ]
    if not any(fit):
        return args
    supported = [
        (row[0].high, row[0].low, *row[1:]) for row, fits in zip(rows, fit, strict=True) if fits
    ]
    numbers = {name: kwargs[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    split_update.adamw(*_columns(supported), **numbers, skip=kwargs.get("found_inf"))
    rest = [row for row, fits in zip(rows, fit, strict=True) if not fits]
    weights, gradients, exp_avgs, exp_avg_sqs, steps = _columns(rest) if rest else [[]] * 5
    return weights, gradients, exp_avgs, exp_avg_sqs, [], steps


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _on_joined(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on joined weights, and split those that it writes to."""
    written: dict[int, tuple[SplitTensor, Tensor]] = {}

    def joined(value: Any) -> Any:
        if not isinstance(value, SplitTensor):
            return value
        weight = join(value.high, value.low)
        written[id(weight)] = (value, weight)
        return weight

    result = func(*tree_map(joined, args), **tree_map(joined, kwargs))
    if any(argument.is_write for argument in func._schema.arguments):
        for original, weight in written.values():
            original._assign(weight)
    return tree_map(lambda value: written[id(value)][0] if id(value) in written else value, result)


def _in_pieces(args: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the arguments of an operation on many tensors in pieces of bounded size.

    Each list among the arguments has one entry per tensor, or is empty.
    """
    count = len(args[0])
    start, weights = 0, 0
    for stop, tensor in enumerate(args[0], start=1):
        weights += tensor.numel()
        if stop == count or weights + args[0][stop].numel() > JOINED_AT_ONCE:
            yield [
                arg[start:stop] if isinstance(arg, (list, tuple)) and len(arg) == count else arg
                for arg in args
            ]
            start, weights = stop, 0


def split_weights(model: LanguageModel, _mesh: object) -> LanguageModel:
    """Split every matrix of the model in place; vectors are too small to matter."""
    kinds = model.parameter_kinds()
    for name, parameter in list(model.named_parameters()):
        if kinds[name] != "vector" and parameter.dtype == torch.float32:
            module, _, own = name.rpartition(".")
            with torch.no_grad():
                parts = SplitTensor(*split(parameter.detach()))
            setattr(
                model.get_submodule(module),
                own,
                nn.Parameter(parts, requires_grad=parameter.requires_grad),
            )
    return model
