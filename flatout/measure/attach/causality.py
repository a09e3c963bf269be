"""Tries what a model's outputs depend on: the tokens that it predicts, other rows of the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

LEAST, MOSTLY, CLEARLY = 8, 0.9, 0.2
"""Fewest tokens of a row, share of the targets that must be the next tokens, and how much larger
than the share that is the tokens themselves.
"""
TOLERANCE = 1e-4
"""Largest difference of outputs, as a share of the largest one, that is rounding."""


def predicted(inputs: Sequence[Tensor], targets: Tensor) -> int | None:
    """Return the number of the input whose next tokens the targets are. None: of none, or several.

    Shapes: inputs of any shape, those of tokens (B, T); targets with B * T or B * (T - 1) elements.
    """
    shares = [_follow(tokens, targets, 1) for tokens in inputs]
    best = max(shares, default=0.0)
    return shares.index(best) if best and shares.count(best) == 1 else None


def laid_out(inputs: Sequence[Tensor], targets: Tensor) -> set[tuple[int, ...]]:
    """Return the shapes that targets had which are next tokens, before they were flattened.

    Shapes: inputs of any shape, those of tokens (B, T) or (T, B).
    """
    found = set()
    for tokens, dim in product(inputs, (0, 1)):
        if _follow(tokens, targets, dim):
            shape = [*tokens.shape]
            shape[dim] -= targets.numel() != tokens.numel()
            found.add(tuple(shape))
    return found


def _follow(tokens: Tensor, targets: Tensor, dim: int) -> float:
    """Return the share of the targets that are the next tokens along a dimension. 0: too few."""
    if tokens.dim() != 2 or tokens.dtype != targets.dtype or tokens.shape[dim] < LEAST:
        return 0.0
    most, given = tokens.shape[dim] - 1, targets.reshape(-1)
    later, earlier = (tokens.narrow(dim, first, most).reshape(-1) for first in (1, 0))
    if given.numel() == tokens.numel():
        given = given.view_as(tokens).narrow(dim, 0, most).reshape(-1)
    is_known = given >= 0  # negative ones are ignored
    if given.numel() != later.numel() or not is_known.any():
        return 0.0
    share, own = (float((given == one)[is_known].double().mean()) for one in (later, earlier))
    return share if share > max(MOSTLY, own + CLEARLY) else 0.0  # equal tokens tell nothing


def are_own(inputs: Sequence[Tensor], targets: Tensor) -> bool:
    """Return whether targets are the tokens that a model is given, which are not all alike.

    A model that computes its own loss is given the targets, too: all its tokens must be the same.
    Shapes: inputs of any shape, those of tokens (B, T); targets with B * T elements.
    """
    every = [
        one
        for one in inputs
        if one.dim() == 2 and one.shape[1] >= LEAST and one.dtype == targets.dtype
    ]
    return any(
        float((one[:, 1:] == one[:, :-1]).double().mean()) < MOSTLY for one in every
    ) and all(
        torch.equal(one.reshape(-1), targets.reshape(-1)) for one in every if int(one.max()) > 1
    )


def looks_ahead(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
) -> bool:
    """Return whether outputs for earlier tokens change when the last token of the last row does.

    One row, since others may compete with it, as for the places of experts. It calls the model
    three times, as `_outputs` does.
    """
    leaves, form = tree_flatten((args, kwargs))
    at = [place for place, one in enumerate(leaves) if type(one) is Tensor][number]
    tokens = leaves[at]
    changed = tokens.clone()
    others = tokens[tokens != tokens[-1, -1]]
    changed[-1, -1] = others[0] if others.numel() else tokens[-1, -1]
    other = tree_unflatten([*leaves[:at], changed, *leaves[at + 1 :]], form)
    for every in _outputs(model, (args, kwargs), other):
        if every[0].shape[0] == tokens.numel():  # rows and tokens in one dimension
            every = [each.view(*tokens.shape, -1) for each in every]
        if every[0].shape[:2] == tokens.shape:
            return _differ(*(each[:, :-1] for each in every))
    return False


def mixes_rows(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_size: int | None = None
) -> bool:
    """Return whether outputs for other rows change when the first row of the inputs does.

    What is square tells nothing: a graph, or pairs of rows; nor what layers take for a single
    sequence or image. Nor do rows that are independent of each other along the second dimension:
    then the first one is time. So it is where the inputs differ in it. If a loader states its
    `batch_size`, and the first dimension alone has it, that one has the rows.
    """
    given = (args, kwargs)
    inputs = [one for one in tree_leaves(given) if isinstance(one, Tensor) and one.dim()]
    along = int(len({one.shape[0] for one in inputs}) > 1)  # sequences with time first
    rows = {one.shape[along] for one in inputs if one.dim() > along}
    is_square = any(one.shape[:1] == one.shape[1:] for one in inputs)
    # one dimension is that of the tokens of one sequence
    if len(rows) != 1 or 1 in rows or is_square or max(map(Tensor.dim, inputs)) < 2:
        return False

    def changed(dim: int) -> Any:
        """Return the inputs with the second row, or column, in place of the first as well."""

        def change(one: Tensor) -> Tensor:
            if one.dim() <= dim or one.shape[dim] < 2:
                return one
            return torch.cat([one.narrow(dim, 1, 1), one.narrow(dim, 1, one.shape[dim] - 1)], dim)

        return tree_map_only(Tensor, change, given)

    found, single = dict[tuple[int, int], bool](), list[nn.Module]()

    def look(module: nn.Module, args: Any) -> None:
        sizes = 1 if isinstance(module, nn.RNNBase) else len(getattr(module, "kernel_size", ()))
        if isinstance(module, (nn.RNNBase, _ConvNd)) and args and args[0].dim() < sizes + 2:
            single.append(module)

    with register_module_forward_pre_hook(look):
        outputs = [*_outputs(model, given, changed(0), changed(1))]
    for every in () if single else outputs:
        shape = every[0].shape
        if shape[:1] == shape[1:]:
            return False
        for dim, place in product((0, 1), (0, 1)):
            sizes = {one.shape[dim] for one in inputs if one.dim() > dim}
            if len(shape) > place and sizes == {shape[place]} and shape[place] > 1:
                others = (each.narrow(place, 1, shape[place] - 1) for each in every)
                one, same, *changes = others
                differs = _differ(one, same, changes[dim])
                found[dim, place] = found.get((dim, place), True) and differs
        if shape[0] < min(one.shape[0] for one in inputs):  # the first time step has no target
            along = 1
    first, second = ({one.shape[dim] for one in inputs if one.dim() > dim} for dim in (0, 1))
    if first == {batch_size} and batch_size not in second:
        return found.get((0, 0), False)
    main = (0, 0) if (0, 0) in found else (along, along)
    return found.get(main, False) and all(found.values())


def _outputs(model: nn.Module, given: Any, *others: Any) -> Iterator[list[Tensor]]:
    """Yield each output with at least two dimensions: of inputs, of the same, and of others.

    The model is called in evaluation mode, with the same random numbers, which are not the
    script's.
    """
    modes = {module: module.training for module in model.modules()}
    devices = [one.device for one in tree_leaves(given) if isinstance(one, Tensor) and one.is_cuda]
    outputs, drawn = [], (random.getstate(), np.random.get_state())
    with torch.no_grad(), torch.random.fork_rng(devices[:1]):
        try:
            for module in modes:
                module.training = False
            for args, kwargs in (given, given, *others):
                torch.manual_seed(0)
                random.seed(0)
                np.random.seed(0)
                outputs.append(tree_leaves(model(*args, **kwargs)))
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
            for module, mode in modes.items():
                module.training = mode
    for every in zip(*outputs, strict=True):
        if isinstance(every[0], Tensor) and every[0].is_floating_point() and every[0].dim() > 1:
            yield [each.float() for each in every]


def _differ(one: Tensor, same: Tensor, other: Tensor) -> bool:
    """Return whether outputs of other inputs differ, where those of the same do not."""
    is_far = (one - other).abs().max() > TOLERANCE * one.abs().max()
    return torch.equal(one, same) and bool(is_far)
