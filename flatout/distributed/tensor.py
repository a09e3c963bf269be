"""Tensor parallelism: the ranks of a group share each matrix, and between matrices the tokens.

A rank has some of the heads, of the columns inside the MLP and of the vocabulary. A matrix that
reads hidden states gathers the tokens of all ranks. One that writes them adds up what the ranks
have computed, and each keeps its own tokens. Parameters are DTensors of the group: cut, or whole
on every rank, where each has a part of the gradient.

Letters: B rows, T tokens of the row, S tokens of this rank, D width, R ranks.

Source: Shoeybi et al. 2019, arXiv:1909.08053; tokens: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatout.distributed.context import Gather, Scatter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

TENSOR = "tensor"
"""The dimension of the mesh."""
P = TypeVar("P", Tensor, Tensor | None)


class Cut(NamedTuple):
    """How a parameter is divided among ranks: each gets its part of each of several matrices."""

    dim: int
    parts: tuple[int, ...]
    """Rows (or columns, if `dim` is 1) of the matrices that the parameter stacks."""

    def empty(self, whole: Tensor, size: int) -> Tensor:
        """Return an unfilled tensor with the shape of a rank's part of `whole`, of `size` ranks.

        Shapes:  any.
        """
        shape = list(whole.shape)
        shape[self.dim] //= size
        return whole.detach().new_empty(shape)


@dataclass(frozen=True)
class Split:
    """The part of a model that this rank computes."""

    group: Any
    rank: int
    size: int

    def spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return start and end of this rank's tokens between the matrices."""
        share = num_tokens // self.size
        return [(self.rank * share, (self.rank + 1) * share)]

    def gathered(self, own_BSD: Tensor, dim: int = 1) -> Tensor:
        """Return the tokens of all ranks. Their gradients are added up.

        Shapes:  any, S in `dim`; returns T in its place.
        """
        every: Tensor = Gather.apply(own_BSD, self.group, self.size)  # type: ignore[no-untyped-call]
        return torch.cat(every.unbind(), dim)

    def reduced(self, partial_BTD: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over all ranks.

        Shapes:  partial_BTD (B, T, D).
        Returns: (B, S, D).
        """
        stacked_RBSD = torch.stack(partial_BTD.chunk(self.size, dim=1))
        own_BSD: Tensor = Scatter.apply(stacked_RBSD, self.group)  # type: ignore[no-untyped-call]
        return own_BSD

    def added(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum of the ranks' values, or another reduction, in place and without gradient.

        Shapes:  any.
        """
        dist.all_reduce(values, op=op, group=self.group)
        return values

    def add_parts(self, gradients: list[Tensor]) -> None:
        """Add up the gradients of parameters that are whole on every rank. Each has a part of them.

        Shapes:  any: this rank's shards.
        Cost:    one all-reduce of all of them.
        """
        if gradients:
            flat = self.added(torch.cat([gradient.flatten() for gradient in gradients]))
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, added in zip(gradients, torch.split(flat, sizes), strict=True):
                gradient.copy_(added.view_as(gradient))


def split_of(mesh: DeviceMesh) -> Split:
    """Return this rank's part of layers, all of them if no ranks of the mesh share layers."""
    if TENSOR not in (mesh.mesh_dim_names or ()):
        return Split(None, 0, 1)
    return Split(mesh.get_group(TENSOR), mesh.get_local_rank(TENSOR), mesh[TENSOR].size())


def is_shared(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Return whether ranks share a tensor: a DTensor, whose class takes half a second to import.

    Shapes:  any.
    """
    return hasattr(tensor, "placements")


def local(parameter: P) -> P:
    """Return this rank's part of a parameter that ranks share. Others unchanged.

    Shapes:  any.
    """
    return parameter.to_local() if is_shared(parameter) else parameter


def cut(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut]) -> None:
    """Replace the parameters of a model on the meta device by DTensors, cut or whole.

    The rows of a parameter that stacks matrices are in a different order there: those of rank 0
    first. `boxes_of` returns where this rank's are.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for prefix, module in model.named_modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            part: Tensor = whole.detach()
            placements: list[Placement] = [Replicate()]
            if (found := cuts.get(f"{prefix}.{name}" if prefix else name)) is not None:
                part, placements = found.empty(whole, mesh.size()), [Shard(found.dim)]
            shared = DTensor.from_local(part, mesh, placements, run_check=False)
            module.register_parameter(name, nn.Parameter(shared, whole.requires_grad))


def cut_dim(tensor: Tensor) -> int | None:
    """Return the dimension in which ranks that share layers divide a tensor, or None.

    Shapes:  any.
    """
    if not is_shared(tensor) or TENSOR not in (tensor.device_mesh.mesh_dim_names or ()):
        return None
    dim: int | None = getattr(tensor.placements[-1], "dim", None)
    return dim


def boxes_of(tensor: Tensor, cut: Cut | None = None) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return this rank's boxes of a tensor: where each starts in the whole, and its values.

    It is one box, unless ranks share several matrices that the tensor stacks, as `cut` describes.

    Shapes: tensor of any shape; the values share its memory.
    """
    if not is_shared(tensor):
        return [((0,) * tensor.dim(), tensor.detach())]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, part = tensor.device_mesh, tensor.to_local().detach()
    # The public API has no offset of a DTensor's local part. torch's own checkpoints use this too.
    _, starts = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    if cut is None or len(cut.parts) == 1 or TENSOR not in (mesh.mesh_dim_names or ()):
        return [(tuple(starts), part)]
    dim, rank, size = cut.dim, mesh.get_local_rank(TENSOR), mesh.size(-1)
    first = starts[dim] - rank * (tensor.shape[dim] // size)  # in what this group's rank has
    boxes, before, done = [], 0, 0
    for rows in cut.parts:
        share = rows // size
        low, high = max(first, done), min(first + part.shape[dim], done + share)
        if low < high:
            there = list(starts)
            there[dim] = before + rank * share + low - done
            boxes.append((tuple(there), part.narrow(dim, low - first, high - low)))
        before, done = before + rows, done + share
    return boxes
