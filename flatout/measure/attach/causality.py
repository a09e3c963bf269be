"""Tries whether a model that is trained to predict the next token can see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

LEAST, MOSTLY = 8, 0.9
"""Fewest tokens of a row, and share of the targets that must be the next tokens."""
TOLERANCE = 1e-3
"""Largest difference of outputs, as a share of the largest one, that is rounding."""


def predicted(inputs: Sequence[Tensor], targets: Tensor) -> int | None:
    """Return the number of the inputs whose next tokens the targets are. None: of none.

    Shapes: inputs of any shape, those of tokens (B, T); targets with B * T or B * (T - 1) elements.
    """
    for number, tokens in enumerate(inputs):
        if tokens.dim() != 2 or tokens.dtype != targets.dtype or tokens.shape[1] < LEAST:
            continue
        later, given = tokens[:, 1:], targets.reshape(-1)
        if given.numel() == tokens.numel():
            given = given.view_as(tokens)[:, :-1].reshape(-1)
        if given.numel() != later.numel():
            continue
        is_known = given >= 0  # negative ones are ignored
        same = (given == later.reshape(-1))[is_known]
        if same.numel() and float(same.double().mean()) > MOSTLY:
            return number
    return None


def looks_ahead(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
) -> bool:
    """Return whether outputs for earlier tokens change when only the last tokens of an input do.

    It calls the model three times in evaluation mode, with the same random numbers, which are not
    the script's. A model whose outputs change by themselves tells nothing.
    """
    leaves, form = tree_flatten((args, kwargs))
    at = [place for place, one in enumerate(leaves) if type(one) is Tensor][number]
    tokens = leaves[at]
    changed = tokens.clone()
    changed[:, -1] = tokens[:, 0]
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
