"""AdamW for every parameter, without weight decay on norms, biases and embeddings."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from flatout.config.sections import OptimConfig
from flatout.optimizers.groups import (
    AdamWSettings,
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


def per_parameter(groups: list[ParameterGroup], keywords: AdamWSettings) -> Optimizer:
    """Return AdamW as a plain loop over parameters, with about ten small kernels for each."""
    return AdamW(groups, **keywords, foreach=False, fused=False)


def fused(groups: list[ParameterGroup], keywords: AdamWSettings) -> Optimizer:
    """Return AdamW that updates many parameters in one kernel."""
    return AdamW(groups, **keywords, fused=True)


OPTIMIZER = build
