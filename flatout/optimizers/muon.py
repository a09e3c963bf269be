"""Muon for the matrices of the hidden layers: momentum, orthogonalised; AdamW for everything else.

A parameter that the model declares to be several matrices on top of each other, as a fused
query-key-value weight, is orthogonalised part by part: each part has its own singular values.

Letters: N matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from flatout.models.split_weights import SplitTensor, decay_and_add
from flatout.ops.newton_schulz import batched
from flatout.optimizers.groups import OptimizerParts, adamw_groups, named_by_kind
from flatout.optimizers.moments import MOMENTUM, Moments

RMS_LIKE_ADAMW = 0.2
"""An orthogonal matrix has entries of RMS 1/sqrt(max(R, C)), AdamW's updates one of about 0.2: with
this scale both share a learning rate.
"""
STACK_ELEMENTS = 2**27
"""Largest number of entries orthogonalised at once, so that the stack stays small beside the model.
"""


def build(model: nn.Module, config: OptimConfig, parts: OptimizerParts) -> tuple[Optimizer, ...]:
    """Return Muon for the two-dimensional hidden weights, and an AdamW for the rest, made by
    `parts.adamw`; either may be missing.

    Raises: ConfigError when the model does not state what a parameter is, or states parts that do
            not make it up.
    """
    stated: Any = model
    rows_by_name = stated.stacked_rows() if hasattr(model, "stacked_rows") else {}
    matrices: list[nn.Parameter] = []
    stacked: dict[nn.Parameter, tuple[int, ...]] = {}
    rest: list[tuple[str, nn.Parameter]] = []
    for name, (kind, parameter) in named_by_kind(model).items():
        if kind == "hidden" and parameter.ndim == 2:
            matrices.append(parameter)
            if name in rows_by_name:
                stacked[parameter] = _checked_rows(name, parameter, rows_by_name[name])
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


def _checked_rows(name: str, parameter: Tensor, rows: tuple[int, ...]) -> tuple[int, ...]:
    if sum(rows) != parameter.shape[0] or min(rows) < 1:
        raise ConfigError(
            f"stacked_rows() cuts the {parameter.shape[0]} rows of {name!r} into {rows}.",
            fix="Let it give positive numbers that add up to its rows.",
        )
    return rows


@dataclass(frozen=True)
class _Matrix:
    """What is orthogonalised as one: a parameter, or some of its rows."""

    index: int
    """Which parameter."""
    start: int
    stop: int
    """Its rows there."""
    columns: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.columns


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz iterations, with decoupled weight decay.
    Takes matrices only.

    `stacked_rows` gives the rows of each part of a parameter that is several matrices on top of
    each other; its momentum is one. `newton_schulz` is a function of `flatout.ops.newton_schulz`:
    how the iterations are carried out. Matrices of one shape, or of one shape and its transpose, go
    to the iterations together. A sharded matrix is gathered, orthogonalised on every rank, and each
    rank keeps its own part; momentum stays sharded.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; scale and decay of Liu et al.
            2025, arXiv:2502.16982.
    """

    def __init__(
        self,
        params: Iterable[Any],
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
        """Return what is kept for a parameter.

        Shapes: _parameter of any shape.
        """
        return MOMENTUM

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group["lr"], group["weight_decay"], group["momentum"])
        return loss

    @torch.no_grad()
    def warm_up(self) -> None:
        """Carry the iterations out once on zeros in every shape that a step will have; nothing is
        changed.
        """
        for group in self.param_groups:
            for batch in _batches(self._matrices([p for p in group["params"] if p.requires_grad])):
                self._newton_schulz(_empty_stack(batch, group["params"]).zero_())

    def give_up_compiling(self) -> None:
        """Carry the iterations out uncompiled from now on."""
        self._newton_schulz = batched

    def _update(
        self, parameters: list[nn.Parameter], lr: float, weight_decay: float, momentum: float
    ) -> None:
        directions = self._directions(parameters, momentum)
        kept = 1 - lr * weight_decay
        shards = [_local(p) for p in parameters if isinstance(p, DTensor)]
        if shards:
            torch._foreach_mul_(shards, kept)
        for batch in _batches(self._matrices(parameters)):
            steps_NRC = self._newton_schulz(_stack(batch, directions))
            _add_batch(
                parameters,
                batch,
                steps_NRC,
                kept,
                -lr * RMS_LIKE_ADAMW * math.sqrt(max(batch[0].shape)),
            )

    def _matrices(self, parameters: list[nn.Parameter]) -> Iterator[_Matrix]:
        for index, parameter in enumerate(parameters):
            stop = 0
            for rows in self._stacked_rows.get(parameter, (parameter.shape[0],)):
                start, stop = stop, stop + rows
                yield _Matrix(index, start, stop, parameter.shape[1], parameter.dtype)

    def _directions(self, parameters: list[nn.Parameter], momentum: float) -> list[Tensor]:
        """Advance each momentum buffer and return where Nesterov's rule points, sharded as the
        parameters are.
        """
        gradients = [_gradient(p) for p in parameters]
        for p, gradient in zip(parameters, gradients, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        local_gradients, local_buffers = (
            [_local(g) for g in gradients],
            [_local(b) for b in buffers],
        )
        torch._foreach_lerp_(local_buffers, local_gradients, 1 - momentum)
        local = torch._foreach_lerp(local_gradients, local_buffers, momentum)
        return [_like(direction, p) for direction, p in zip(local, parameters, strict=True)]


def _batches(matrices: Iterable[_Matrix]) -> Iterator[list[_Matrix]]:
    """Matrices that share a shape, lying down or upright, in batches of bounded size."""
    by_shape: dict[Any, list[_Matrix]] = {}
    for matrix in matrices:
        by_shape.setdefault((*sorted(matrix.shape), matrix.dtype), []).append(matrix)
    for (rows, columns, _), members in by_shape.items():
        most = max(1, STACK_ELEMENTS // max(1, rows * columns))
        size = math.ceil(
            len(members) / math.ceil(len(members) / most)
        )  # as equal as can be: a compiler compiles for each shape
        for start in range(0, len(members), size):
            yield members[start : start + size]


def _empty_stack(batch: list[_Matrix], like: list[Any]) -> Tensor:
    return torch.empty(
        (len(batch), *sorted(batch[0].shape)),
        dtype=batch[0].dtype,
        device=_local(like[batch[0].index]).device,
    )


def _stack(batch: list[_Matrix], directions: list[Tensor]) -> Tensor:
    """The batch's matrices, lying down; a sharded parameter is gathered once for all its parts in
    the batch, one at a time.
    """
    stack_NRC = _empty_stack(batch, directions)
    if not isinstance(directions[batch[0].index], DTensor):
        torch._foreach_copy_(
            list(stack_NRC),
            [_upright(directions[matrix.index][matrix.start : matrix.stop]) for matrix in batch],
        )
        return stack_NRC
    pairs = zip(stack_NRC, batch, strict=True)
    for index, members in groupby(pairs, key=lambda pair: pair[1].index):
        whole = _whole(directions[index])
        for place_RC, matrix in members:
            place_RC.copy_(_upright(whole[matrix.start : matrix.stop]))
    return stack_NRC


def _add_batch(
    parameters: list[nn.Parameter],
    batch: list[_Matrix],
    steps_NRC: Tensor,
    kept: float,
    alpha: float,
) -> None:
    """Decay each matrix and add alpha times its step: all of a batch in a few kernels, for which
    both have one layout. Shards are decayed before.
    """
    lies = [matrix.shape[0] <= matrix.shape[1] for matrix in batch]
    if isinstance(parameters[batch[0].index], DTensor):
        for matrix, step_RC, lying in zip(batch, steps_NRC, lies, strict=True):
            _add_to_shard(parameters[matrix.index], matrix, step_RC if lying else step_RC.T, alpha)
        return
    if not isinstance(
        parameters[batch[0].index], SplitTensor
    ):  # a split weight's kernel reads narrow steps as they are
        steps_NRC = steps_NRC.to(batch[0].dtype)
    steps_NCR = steps_NRC if all(lies) else steps_NRC.mT.contiguous()
    steps = [
        lying_RC if lying else upright_CR
        for lying_RC, upright_CR, lying in zip(steps_NRC, steps_NCR, lies, strict=True)
    ]
    decay_and_add(
        [parameters[matrix.index][matrix.start : matrix.stop] for matrix in batch],
        steps,
        kept=kept,
        alpha=alpha,
    )


def _add_to_shard(parameter: Any, matrix: _Matrix, step: Tensor, alpha: float) -> None:
    """Add alpha times `step` to what this rank has of the matrix's rows."""
    in_place = functional.pad(step, (0, 0, matrix.start, parameter.shape[0] - matrix.stop))
    _local(parameter).add_(_part_of(in_place, parameter), alpha=alpha)


def _upright(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None  # step() passes only parameters that have one
    return gradient


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    """A rank's part as the sharded tensor it is a part of."""
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


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank holds whole: cutting needs no communication."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(
        whole.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return everywhere.redistribute(mesh, parameter.placements).to_local()


OPTIMIZER = build
