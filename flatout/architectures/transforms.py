"""Tensors that correspond one to one, transposed, stacked, shifted by one or in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flatout.architectures import TensorMap

Kind = Callable[[str, str], TensorMap]
"""How a tensor corresponds to the family's: (name, foreign name) -> map."""


def same(name: str, foreign: str) -> TensorMap:
    """Return the map of a tensor that is equal on both sides."""
    return TensorMap(name, (foreign,), lambda parts: parts[0], lambda whole: [whole])


def transposed(name: str, foreign: str) -> TensorMap:
    """Return the map of a tensor whose axes the family stores in the opposite order."""
    return TensorMap(name, (foreign,), lambda parts: _turned(parts[0]), lambda w: [_turned(w)])


def plus_one(name: str, foreign: str) -> TensorMap:
    """Return the map of a gain that the family stores as its difference from 1."""
    return TensorMap(name, (foreign,), lambda parts: parts[0] + 1, lambda whole: [whole - 1])


def stacked(name: str, foreign: Sequence[str], rows: Sequence[int]) -> TensorMap:
    """Return the map of a tensor that stacks several of the family's; `rows` are their sizes."""
    return TensorMap(
        name,
        tuple(foreign),
        lambda parts: torch.cat(list(parts)),
        lambda whole: torch.split(whole, list(rows)),
    )


def reordered(name: str, foreign: str, order: Tensor) -> TensorMap:
    """Return the map of a tensor whose row i is row `order[i]` of the family's.

    Shapes:  order (rows,) integers, a permutation.
    """
    inverse = order.argsort()
    return TensorMap(
        name,
        (foreign,),
        lambda parts: parts[0].index_select(0, order.to(parts[0].device)),
        lambda whole: [whole.index_select(0, inverse.to(whole.device))],
    )


def with_bias(kind: Kind, name: str, foreign: str, *, bias: bool) -> list[TensorMap]:
    """Return the maps of the weight and the bias of a layer that has both in the family.

    Without a bias in flatout's model, the family's is 0, with one number per row of the weight.
    """
    weight = kind(f"{name}.weight", f"{foreign}.weight")
    if bias:
        return [weight, kind(f"{name}.bias", f"{foreign}.bias")]

    def join(parts: Sequence[Tensor]) -> Tensor:
        return weight.join(parts[:1])

    def split(whole: Tensor) -> list[Tensor]:
        assert weight.split is not None  # every map of this file has an inverse
        return [*weight.split(whole), whole.new_zeros(whole.shape[0])]

    return [TensorMap(weight.name, (*weight.foreign, f"{foreign}.bias"), join, split)]


def in_blocks(
    names: Mapping[str, tuple[Kind, str]], foreign: str, num_layers: int, *, bias: bool
) -> list[TensorMap]:
    """Return the maps `with_bias` of the layers of all blocks.

    `names` has how each layer of a block corresponds to the family's, and the family's name;
    `foreign` is the family's name of all blocks.
    """
    return [
        one
        for block in range(num_layers)
        for ours, (kind, theirs) in names.items()
        for one in with_bias(
            kind, f"blocks.{block}.{ours}", f"{foreign}.{block}.{theirs}", bias=bias
        )
    ]


def _turned(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.dim() == 2 else tensor
