"""AdamW for every parameter: no weight decay on norms, biases and embeddings."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from flatout.config.sections import OptimConfig
from flatout.optimizers.groups import OptimizerParts, adamw_groups, named_by_kind


def build(model: nn.Module, config: OptimConfig, parts: OptimizerParts) -> tuple[Optimizer, ...]:
    """Return the optimisers of a run: one AdamW, made by `parts.adamw`. The loop sets lr = peak_lr
    * factor(step) in each group.

    Raises: ConfigError when the model does not state what a parameter is.
    """
    groups = adamw_groups(named_by_kind(model).values(), config)
    return (parts.adamw(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps}),)


def per_parameter(groups: list[dict[str, Any]], keywords: dict[str, Any]) -> Optimizer:
    """AdamW as the plain loop over parameters: about ten small kernels each."""
    return AdamW(groups, **keywords, foreach=False, fused=False)


def fused(groups: list[dict[str, Any]], keywords: dict[str, Any]) -> Optimizer:
    """AdamW in one kernel for many parameters."""
    return AdamW(groups, **keywords, fused=True)


OPTIMIZER = build
