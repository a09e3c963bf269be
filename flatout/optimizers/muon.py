"""Muon for the matrices of the hidden layers: orthogonalised momentum; AdamW for everything else.

A parameter that the model declares as several stacked matrices, such as a fused query-key-value
weight, is orthogonalised part by part: each part has its own singular values.

Letters: N matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.optim import Optimizer

from flatout.config.sections import OptimConfig
from flatout.errors import ConfigError
from flatout.ops.newton_schulz import batched
from flatout.optimizers.groups import OptimizerParts, ParameterGroup, adamw_groups, named_by_kind
from flatout.optimizers.moments import MOMENTUM, Moments

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
    matrices: list[nn.Parameter] = []
    stacked: dict[nn.Parameter, tuple[int, ...]] = {}
    rest: list[tuple[str, nn.Parameter]] = []
    for name, (kind, parameter) in named_by_kind(model).items():
        if kind == "hidden" and parameter.ndim == 2:
            matrices.append(parameter)
            if rows := rows_by_name.get(name):
                if sum(rows) != parameter.shape[0] or min(rows) < 1:
                    raise ConfigError(
                        f"stacked_rows() splits the {parameter.shape[0]} rows of {name!r} into "
                        f"{rows}.",
                        fix="Return positive numbers that add up to its rows.",
                    )
                stacked[parameter] = rows
        else:
            rest.append((kind, parameter))
    optimizers: list[Optimizer] = []
    if matrices:
        group = {"params": matrices, "peak_lr": config.lr}
        optimizers.append(
            Muon(
                [group],
                config.lr,
                config.weight_decay,
                config.momentum,
                stacked_rows=stacked,
                newton_schulz=parts.newton_schulz,
            )
        )
    if rest:
        optimizers.append(
            parts.adamw(
                adamw_groups(rest, config),
                {"lr": config.lr, "betas": config.betas, "eps": config.eps},
            )
        )
    return tuple(optimizers)


@dataclass(frozen=True)
class _Matrix:
    """A matrix to orthogonalise: a parameter, or some of its rows."""

    parameter: Any
    direction: Any
    """Nesterov's direction of the whole parameter, sharded like it."""
    start: int
    stop: int
    """The range of its rows in the parameter."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.parameter.shape[1]

    @property
    def is_wide(self) -> bool:
        return self.shape[0] <= self.shape[1]


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz iterations, with decoupled weight decay.

    It is for matrices only. `stacked_rows` maps a parameter that stacks several matrices to their
    row counts; they share a momentum buffer. `newton_schulz` is a function of
    `flatout.ops.newton_schulz`. Matrices of one shape, or of one shape and its transpose, are
    iterated together. A sharded matrix is gathered and orthogonalised on every rank, and each rank
    updates its shard; momentum stays sharded. A step changes nothing if the attribute `found_inf`
    is 1, see `step_with_flag`.

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
        newton_schulz: Callable[[Tensor], Tensor] = batched,
    ) -> None:
        self._newton_schulz = newton_schulz
        self._stacked_rows = dict(stacked_rows or {})
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def moments_of(self, _parameter: Tensor) -> Moments:
        """Return the kind of state that is kept for a parameter.

        Shapes: _parameter of any shape.
        """
        return MOMENTUM

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient; gradients are not changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group, getattr(self, "found_inf", None))
        return loss

    def _update(
        self, parameters: list[nn.Parameter], group: dict[str, Any], skip: Tensor | None
    ) -> None:
        directions = self._directions(parameters, group["momentum"], skip)
        kept = 1 - group["lr"] * group["weight_decay"]
        for shard in [_local(p) for p in parameters if isinstance(p, DTensor)]:
            _assign_unless(skip, [shard], [shard * kept])
        by_shape: dict[Any, list[_Matrix]] = {}
        for parameter, direction in zip(parameters, directions, strict=True):
            stop = 0
            for rows in self._stacked_rows.get(parameter, (parameter.shape[0],)):
                start, stop = stop, stop + rows
                matrix = _Matrix(parameter, direction, start, stop)
                key = (*sorted(matrix.shape), parameter.dtype)
                by_shape.setdefault(key, []).append(matrix)
        for (rows, columns, _), members in by_shape.items():
            size = max(1, STACK_ELEMENTS // max(1, rows * columns))
            for first in range(0, len(members), size):
                batch = members[first : first + size]
                steps_NRC = self._newton_schulz(_stack(batch))
                alpha = -group["lr"] * RMS_LIKE_ADAMW * math.sqrt(columns)
                _add_batch(batch, steps_NRC, kept=kept, alpha=alpha, skip=skip)

    def _directions(
        self, parameters: list[nn.Parameter], momentum: float, skip: Tensor | None
    ) -> list[Tensor]:
        """Update the momentum buffers and return Nesterov's directions, sharded like them."""
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        for p, gradient in zip(parameters, gradients, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        local_gradients, local_buffers = (
            [_local(g) for g in gradients],
            [_local(b) for b in buffers],
        )
        moved = torch._foreach_lerp(local_buffers, local_gradients, 1 - momentum)
        _assign_unless(skip, local_buffers, moved)
        del moved  # before the directions, which need as much memory
        local = torch._foreach_lerp(local_gradients, local_buffers, momentum)
        return [_like(direction, p) for direction, p in zip(local, parameters, strict=True)]


def _stack(batch: list[_Matrix]) -> Tensor:
    """Return the directions of a batch, transposed where they have more rows than columns.

    A sharded parameter is gathered once for all its parts in the batch, one parameter at a time.
    """
    first = batch[0]
    stack_NRC: Tensor = _local(first.direction).new_empty(
        (len(batch), *sorted(first.shape)), dtype=first.parameter.dtype
    )
    targets = [
        target_RC if matrix.is_wide else target_RC.T
        for matrix, target_RC in zip(batch, stack_NRC, strict=True)
    ]
    if not isinstance(first.direction, DTensor):
        torch._foreach_copy_(targets, [m.direction[m.start : m.stop] for m in batch])
        return stack_NRC
    pairs = zip(targets, batch, strict=True)
    for _, members in groupby(pairs, key=lambda pair: id(pair[1].direction)):
        whole: Tensor | None = None
        for target, matrix in members:
            whole = matrix.direction.full_tensor() if whole is None else whole
            target.copy_(whole[matrix.start : matrix.stop])
    return stack_NRC


def _add_batch(
    batch: list[_Matrix], steps_NRC: Tensor, *, kept: float, alpha: float, skip: Tensor | None
) -> None:
    """Decay each matrix and add alpha times its step, unless `skip` is 1.

    The kernels need steps in the layout of the matrices. Shards are already decayed.
    """
    if isinstance(batch[0].parameter, DTensor):
        for matrix, step_RC in zip(batch, steps_NRC, strict=True):
            _add_to_shard(matrix, step_RC if matrix.is_wide else step_RC.T, alpha, skip)
        return
    steps_NRC = steps_NRC.to(batch[0].parameter.dtype)
    is_wide = [matrix.is_wide for matrix in batch]
    steps_NCR = steps_NRC if all(is_wide) else steps_NRC.mT.contiguous()
    steps = [
        step_RC if wide else step_CR
        for step_RC, step_CR, wide in zip(steps_NRC, steps_NCR, is_wide, strict=True)
    ]
    targets: list[Tensor] = [m.parameter[m.start : m.stop] for m in batch]
    moved = torch._foreach_mul(targets, kept)
    torch._foreach_add_(moved, steps, alpha=alpha)
    _assign_unless(skip, targets, moved)


def _add_to_shard(matrix: _Matrix, step: Tensor, alpha: float, skip: Tensor | None) -> None:
    """Add alpha times `step` to this rank's shard of the matrix, unless `skip` is 1."""
    parameter = matrix.parameter
    padded = functional.pad(step, (0, 0, matrix.start, parameter.shape[0] - matrix.stop))
    # Every rank has the whole step, so no communication is needed.
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(
        padded.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    added = everywhere.redistribute(mesh, parameter.placements).to_local()
    shard = _local(parameter)
    _assign_unless(skip, [shard], [shard.add(added, alpha=alpha)])


def _assign_unless(
    skip: Tensor | None, targets: Sequence[Tensor], values: Sequence[Tensor]
) -> None:
    """Copy each value into its target; every bit of the targets stays if `skip` is 1.

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


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares its memory; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard as a tensor sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


OPTIMIZER = build
