"""AdamW for every parameter, without weight decay on norms, biases and embeddings."""

from __future__ import annotations

from inspect import unwrap

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from flatout.config.sections import OptimConfig
from flatout.optim.groups import (
    AdamWSettings,
    LightOptimizer,
    OptimizerParts,
    ParameterGroup,
    adamw_for,
    named_by_kind,
)


def build(model: nn.Module, config: OptimConfig, parts: OptimizerParts) -> tuple[Optimizer, ...]:
    """Return the optimizers of a run: one AdamW, created by `parts.adamw`.

    The loop sets lr = peak_lr * factor(step) in each group.
    Raises: ConfigError when the model does not state the kind of a parameter.
    """
    return (adamw_for(named_by_kind(model).values(), config, parts),)


class LightAdamW(LightOptimizer, AdamW):
    """torch's AdamW, whose steps are not compiled either."""

    step = torch.no_grad()(unwrap(AdamW.step))


def per_parameter(groups: list[ParameterGroup], keywords: AdamWSettings) -> Optimizer:
    """Return AdamW as a plain loop over parameters, with about ten small kernels for each."""
    return LightAdamW(groups, **keywords, foreach=False, fused=False)


def fused(groups: list[ParameterGroup], keywords: AdamWSettings) -> Optimizer:
    """Return AdamW that updates many parameters in one kernel."""
    return LightAdamW(groups, **keywords, fused=True)


OPTIMIZER = build
