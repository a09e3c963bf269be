"""Muon for the matrices of the hidden layers: orthogonalised momentum. AdamW for everything else.

A parameter that the model declares as several stacked matrices, such as a fused query-key-value
weight, is orthogonalised part by part: each part has its own singular values.

Letters: N matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.config.sections import OptimConfig
from flatout.distributed.tensor import cut_dim, is_shared, local, split_of
from flatout.errors import ConfigError
from flatout.ops.newton_schulz import batched
from flatout.optim.groups import (
    LightOptimizer,
    OptimizerParts,
    ParameterGroup,
    adamw_for,
    named_by_kind,
)
from flatout.optim.moments import MOMENTUM, Moments

RMS_LIKE_ADAMW = 0.2
"""The RMS of an orthogonal matrix is 1/sqrt(max(R, C)), that of AdamW's updates about 0.2: this
scale makes one learning rate suit both.
"""
STACK_ELEMENTS = 2**27
"""Elements to orthogonalise at once, so that the stack is small compared with the model."""


def build(model: nn.Module, config: OptimConfig, parts: OptimizerParts) -> tuple[Optimizer, ...]:
    """Return Muon for the hidden matrices and the AdamW of `parts` for the rest, if there are any.

    Raises: ConfigError when the model does not state the kind of a parameter, or states parts that
            do not add up to it.
    """
    rows_by_name: dict[str, tuple[int, ...]] = (
        model.stacked_rows() if hasattr(model, "stacked_rows") else {}  # type: ignore[operator]
    )
    cuts = model.tensor_cuts() if getattr(model, "split", None) else {}  # type: ignore[operator]
    apart: set[nn.Parameter] = set()
    matrices: list[nn.Parameter] = []
    stacked: dict[nn.Parameter, tuple[int, ...]] = {}
    rest: list[tuple[str, nn.Parameter]] = []
    for name, (kind, parameter) in named_by_kind(model).items():
        if kind != "hidden" or parameter.ndim != 2:
            rest.append((kind, parameter))
            continue
        matrices.append(parameter)
        rows = stacked[parameter] = rows_by_name.get(name) or (parameter.shape[0],)
        if name in cuts and len(rows) > len(cuts[name].parts):
            apart.add(parameter)
        if sum(rows) != parameter.shape[0] or min(rows) < 1:
            raise ConfigError(
                f"stacked_rows() splits the {parameter.shape[0]} rows of {name!r} into {rows}.",
                fix="Return positive numbers that add up to its rows.",
            )
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(
            Muon(
                [{"params": matrices, "peak_lr": config.lr}],
                config.lr,
                config.weight_decay,
                config.momentum,
                stacked_rows=stacked,
                apart=apart,
                newton_schulz=parts.newton_schulz,
            )
        )
    if rest:
        optimizers.append(adamw_for(rest, config, parts))
    return tuple(optimizers)


class _Matrix(NamedTuple):
    """A matrix to orthogonalise: a parameter, or some of its rows."""

    parameter: Any
    direction: Tensor
    """Nesterov's direction of the whole parameter."""
    rows: slice
    """Its rows in the parameter."""
    shape: tuple[int, int]

    @property
    def is_wide(self) -> bool:
        return self.shape[0] <= self.shape[1]


class Muon(LightOptimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz iterations, with decoupled weight decay.

    It is for matrices only. `stacked_rows` maps a parameter that stacks several matrices to their
    row counts. They share a momentum buffer. `apart` are those whose matrices ranks that share
    layers have whole, each some of them. `newton_schulz` is a function of
    `flatout.ops.newton_schulz`. Matrices of one shape, or of one shape and its transpose, are
    iterated together. A sharded parameter is orthogonalised by one of the ranks that share it:
    shards of its direction go there, and those of its step come back, in bf16 on CUDA, while
    a different one is iterated. Momentum stays sharded. A step changes nothing if the attribute
    `found_inf` is 1, see `step_with_flag`.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; scale and decay of Liu et al.
            2025, arXiv:2502.16982.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[ParameterGroup],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        stacked_rows: Mapping[nn.Parameter, tuple[int, ...]] | None = None,
        apart: Collection[nn.Parameter] = (),
        newton_schulz: Callable[[Tensor], Tensor] = batched,
    ) -> None:
        self._newton_schulz = newton_schulz
        self._stacked_rows = dict(stacked_rows or {})
        self._apart = apart
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def moments_of(self, _parameter: Tensor) -> Moments:
        """Return the kind of state that is kept for a parameter.

        Shapes: _parameter of any shape.
        """
        return MOMENTUM

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient. Gradients are not changed."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group, getattr(self, "found_inf", None))
        return loss

    def _update(
        self, parameters: list[nn.Parameter], group: dict[str, Any], skip: Tensor | None
    ) -> None:
        kept = 1 - group["lr"] * group["weight_decay"]
        gradients, buffers = [], []
        for p in parameters:
            gradient: Any = p.grad
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            gradients.append(local(gradient))
            buffers.append(local(state["momentum_buffer"]))
        moved = torch._foreach_lerp(buffers, gradients, 1 - group["momentum"])
        _assign_unless(skip, buffers, moved)
        del moved  # before the directions, which need as much memory
        directions = torch._foreach_lerp(gradients, buffers, group["momentum"])
        if is_shared(parameters[0]):
            self._update_shards(parameters, directions, kept, -group["lr"], skip)
            return
        by_shape: dict[Any, list[_Matrix]] = {}
        for p, direction in zip(parameters, directions, strict=True):
            stop = 0
            for rows in self._stacked_rows.get(p, (p.shape[0],)):
                start, stop = stop, stop + rows
                matrix = _Matrix(p, direction, slice(start, stop), (rows, p.shape[1]))
                by_shape.setdefault((*sorted(matrix.shape), p.dtype), []).append(matrix)
        for (rows, columns, _), members in by_shape.items():
            size = max(1, STACK_ELEMENTS // max(1, rows * columns))
            for first in range(0, len(members), size):
                batch = members[first : first + size]
                steps_NRC = self._newton_schulz(_stack(batch))
                alpha = -group["lr"] * RMS_LIKE_ADAMW * math.sqrt(columns)
                _add_batch(batch, steps_NRC, kept=kept, alpha=alpha, skip=skip)

    def _update_shards(
        self,
        parameters: list[nn.Parameter],
        directions: Sequence[Tensor],
        kept: float,
        alpha: float,
        skip: Tensor | None,
    ) -> None:
        """Update this rank's shards. Each rank orthogonalises some of the parameters.

        Ranks that share layers have a part of each matrix: they gather it, and each keeps its part
        of the step.

        Shapes:  directions are those of the shards.
        Cost:    each rank sends and receives about two copies of its shards.
        """
        mesh = cast(Any, parameters[0]).device_mesh
        group, rank = mesh.get_group("shard"), mesh.get_local_rank("shard")
        size = dist.get_world_size(group)
        split = split_of(mesh)
        alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for p, direction in zip(parameters, directions, strict=True):
            parts, dim = self._stacked_rows.get(p, (p.shape[0],)), cut_dim(p)
            if dim == 0 and p in self._apart:
                parts, dim = parts[: len(parts) // split.size], None
            elif dim == 0:
                parts = tuple(rows // split.size for rows in parts)
            key = (direction.shape[1], parts, dim, p.dtype)
            alike.setdefault(key, []).append((local(p), direction))
        batches: list[tuple[Any, list[tuple[Tensor, Tensor]]]] = []
        for key, members in alike.items():
            most = size * max(1, STACK_ELEMENTS // (sum(key[1]) * key[0]))
            starts = range(0, len(members), most)
            batches += [(key, members[start : start + most]) for start in starts]
        coming: deque[tuple[_Exchange, Any]] = deque()
        leaving: deque[tuple[_Exchange, Any]] = deque()

        def arrive(exchange: _Exchange, members: Any) -> None:
            steps = exchange.wait().flatten(0, 1)
            for (shard, direction), step in zip(members, steps, strict=False):
                added = step[: len(direction)].to(shard)
                _assign_unless(skip, [shard], [(shard * kept).add_(added, alpha=alpha)])

        for batch in (*batches, None):
            if batch is not None:
                (columns, parts, *_), members = batch
                count, high = -(-len(members) // size), -(-sum(parts) // size)
                first = members[0][1]
                # offloaded shards are on the CPU, their mesh is not
                where = mesh.device_type
                dtype = torch.bfloat16 if where == "cuda" else first.dtype
                sent = torch.zeros((size, count, high, columns), dtype=dtype, device=where)
                for slot, (_, direction) in zip(sent.flatten(0, 1), members, strict=False):
                    slot[: len(direction)] = direction
                coming.append((_Exchange(sent, group), batch))
            if len(coming) > (batch is not None):  # the next one is on its way meanwhile
                exchange, ((_, parts, dim, _), members) = coming.popleft()
                whole = exchange.wait().transpose(0, 1).flatten(1, 2)
                steps = torch.zeros_like(whole)
                start = 0
                for rows in parts if rank * len(whole) < len(members) else ():
                    part = whole[:, start : start + rows]
                    if dim is not None:
                        part = split.gathered(part, dim + 1)
                    is_wide = part.shape[1] <= part.shape[2]
                    step = self._newton_schulz(part if is_wide else part.mT)
                    step = step if is_wide else step.mT
                    scale = RMS_LIKE_ADAMW * math.sqrt(max(part.shape[1:]))
                    if dim is not None:
                        step = step.chunk(split.size, dim + 1)[split.rank]
                    steps[:, start : start + rows] = scale * step
                    start += rows
                shards = torch.unflatten(steps, 1, (size, -1)).transpose(0, 1).contiguous()
                leaving.append((_Exchange(shards, group), members))
            while len(leaving) > (batch is not None):
                arrive(*leaving.popleft())


class _Exchange:
    """Sends slice r of a tensor to rank r of a group, and receives as many."""

    def __init__(self, sent: Tensor, group: Any) -> None:
        self._sent, self._received = sent, torch.empty_like(sent)
        self._work = dist.all_to_all_single(self._received, sent, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return what the ranks have sent, in their order."""
        self._work.wait()
        return self._received


def _stack(batch: list[_Matrix]) -> Tensor:
    """Return the directions of a batch, transposed where they have more rows than columns."""
    first = batch[0]
    stack_NRC = first.direction.new_empty(
        (len(batch), *sorted(first.shape)), dtype=first.parameter.dtype
    )
    targets = [
        target_RC if matrix.is_wide else target_RC.T
        for matrix, target_RC in zip(batch, stack_NRC, strict=True)
    ]
    torch._foreach_copy_(targets, [m.direction[m.rows] for m in batch])
    return stack_NRC


def _add_batch(
    batch: list[_Matrix], steps_NRC: Tensor, *, kept: float, alpha: float, skip: Tensor | None
) -> None:
    """Decay each matrix and add alpha times its step, unless `skip` is 1.

    The kernels need steps in the layout of the matrices.
    """
    steps_NRC = steps_NRC.to(batch[0].parameter.dtype)
    is_wide = [matrix.is_wide for matrix in batch]
    steps_NCR = steps_NRC if all(is_wide) else steps_NRC.mT.contiguous()
    steps = [
        step_RC if wide else step_CR
        for step_RC, step_CR, wide in zip(steps_NRC, steps_NCR, is_wide, strict=True)
    ]
    targets: list[Tensor] = [m.parameter[m.rows] for m in batch]
    moved = torch._foreach_mul(targets, kept)
    torch._foreach_add_(moved, steps, alpha=alpha)
    _assign_unless(skip, targets, moved)


def _assign_unless(
    skip: Tensor | None, targets: Sequence[Tensor], values: Sequence[Tensor]
) -> None:
    """Copy each value into its target. Every bit of the targets stays if `skip` is 1.

    The values may contain anything then, NaN included.

    Shapes:  skip is 0-D, None stands for 0; each pair has one shape and dtype.
    Cost:    with a flag one kernel per pair, which reads both and writes one.
    """
    if skip is None:
        torch._foreach_copy_(list(targets), list(values))
        return
    stays = skip > 0
    for target, value in zip(targets, values, strict=True):
        torch.where(stays, target, value, out=target)


OPTIMIZER = build
