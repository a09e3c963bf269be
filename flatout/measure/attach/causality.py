"""Tries whether a model that is trained to predict the next token can see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

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
    found = dict[int, float]()
    for number, tokens in enumerate(inputs):
        if tokens.dim() != 2 or tokens.dtype != targets.dtype or tokens.shape[1] < LEAST:
            continue
        later, given = tokens[:, 1:], targets.reshape(-1)
        if given.numel() == tokens.numel():
            given = given.view_as(tokens)[:, :-1].reshape(-1)
        if given.numel() != later.numel():
            continue
        is_known = given >= 0  # negative ones are ignored
        if not is_known.any():
            continue
        next_, own = (
            float((given == one.reshape(-1))[is_known].double().mean())
            for one in (later, tokens[:, :-1])
        )
        if next_ > max(MOSTLY, own + CLEARLY):  # rows of equal tokens tell nothing
            found[number] = next_
    best = max(found.values(), default=0.0)
    at = [number for number, share in found.items() if share == best]
    return at[0] if len(at) == 1 else None


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

    One row, since others may compete with it, as for the places of experts.

    It calls the model three times in evaluation mode, with the same random numbers, which are not
    the script's. A model whose outputs change by themselves tells nothing.
    """
    leaves, form = tree_flatten((args, kwargs))
    at = [place for place, one in enumerate(leaves) if type(one) is Tensor][number]
    tokens = leaves[at]
    changed = tokens.clone()
    others = tokens[tokens != tokens[-1, -1]]
    changed[-1, -1] = others[0] if others.numel() else tokens[-1, -1]
    modes = {module: module.training for module in model.modules()}
    outputs = []
    devices = [tokens.device] if tokens.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            for module in modes:
                module.training = False
            for leaves[at] in (tokens, tokens, changed):
                torch.manual_seed(0)
                words, options = tree_unflatten(leaves, form)
                outputs.append(tree_leaves(model(*words, **options)))
        finally:
            for module, mode in modes.items():
                module.training = mode
    for every in zip(*outputs, strict=True):
        one = every[0]
        if not isinstance(one, Tensor) or not one.is_floating_point() or one.dim() < 2:
            continue
        if one.shape[0] == tokens.numel():  # rows and tokens in one dimension
            every = tuple(each.view(*tokens.shape, -1) for each in every)
        if every[0].shape[:2] == tokens.shape:
            one, same, other = (each[:, :-1].float() for each in every)
            is_same = torch.equal(one, same)
            return is_same and bool((one - other).abs().max() > TOLERANCE * one.abs().max())
    return False
