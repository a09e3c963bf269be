"""Creates the optimizers of a run, and parameter groups with and without weight decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature, unwrap
from typing import Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.config.registry import OPTIMIZERS
from flatout.config.schema import RunConfig
from flatout.config.sections import OptimConfig
from flatout.errors import ConfigError

ParameterGroup = dict[str, Any]
"""A group as torch takes it: `params`, and its settings by name."""


class AdamWSettings(TypedDict):
    """The settings of AdamW that are equal in all groups."""

    lr: float
    betas: tuple[float, float]
    eps: float


AdamWFactory = Callable[[list[ParameterGroup], AdamWSettings], Optimizer]
"""Creates an AdamW. Each group sets its weight_decay."""


class LightOptimizer(Optimizer):
    """An optimizer that is created without torch's compiler, whose import takes half a second."""

    add_param_group = unwrap(Optimizer.add_param_group)


@dataclass(frozen=True)
class OptimizerParts:
    """The implementations that optimizers are built from, which speedups replace."""

    adamw: AdamWFactory
    """Creates the AdamW for the parameters that use it."""
    newton_schulz: Callable[[Tensor], Tensor]
    """Defined by `flatout.ops.newton_schulz.reference`."""


CALL = "build(model, config, parts)"


def optimizers_of(
    config: RunConfig, model: nn.Module, parts: OptimizerParts
) -> tuple[Optimizer, ...]:
    """Return the optimizers of a run, created by the function that `optim.kind` names.

    Raises: ConfigError when it has a different signature, or does not return a tuple of torch
            optimizers with peak_lr in each group and each trainable parameter in one group.
    """
    kind, build = config.optim.kind, OPTIMIZERS.get(config.optim.kind)
    as_documented = (
        f"Define {CALL} so that it returns a tuple of torch optimizers, as docs/extend.md shows"
    )
    if isinstance(build, type):
        raise ConfigError(
            f"optim.kind={kind} is a class, not a function that returns the optimizers of a model.",
            fix=f"{as_documented}.",
        )
    try:
        signature(build).bind(model, config.optim, parts)
    except TypeError as error:
        raise ConfigError(
            f"The optimizer {kind} cannot be called as {CALL}: {error}.", fix=f"{as_documented}."
        ) from error
    result = build(model, config.optim, parts)
    is_sequence = isinstance(result, tuple | list) and result
    if not (is_sequence and all(isinstance(one, Optimizer) for one in result)):
        single = "a single " if isinstance(result, Optimizer) else ""
        actual = single + type(result).__name__ if result else repr(result)
        raise ConfigError(
            f"The optimizer {kind} returned {actual}, not a tuple of torch optimizers.",
            fix=f"{as_documented}. For a single one: (optimizer,).",
        )
    groups = [group for one in result for group in one.param_groups]
    if any("peak_lr" not in group for group in groups):
        raise ConfigError(
            f"The optimizer {kind} has a parameter group without peak_lr, which the schedule "
            "multiplies.",
            fix='Write each group as {"params": [...], "peak_lr": config.lr}.',
        )
    updates = Counter(p for group in groups for p in group["params"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and updates[parameter] != 1:
            raise ConfigError(
                f"The optimizer {kind} has {name} in {updates[parameter]} of its groups, not one.",
                fix="Write each parameter into one group. The model freezes those that are not "
                "trained: parameter.requires_grad_(False).",
            )
    return tuple(result)


KINDS = ("hidden", "embedding", "head", "vector")
DECAYED = ("hidden", "head")
"""Kinds with weight decay. A tied head is an embedding."""


def named_by_kind(model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """Return {name: (kind, parameter)} for all trainable parameters, each once.

    Raises: ConfigError when the model does not state the kind of a parameter, or states an unknown
            kind.
    """
    kinds: dict[str, str] = model.parameter_kinds()  # type: ignore[operator]
    parameters = {}
    for name, parameter in model.named_parameters():
        kind = kinds.get(name)
        if kind not in KINDS:
            raise ConfigError(
                f"{type(model).__name__} states the kind {kind!r} for its parameter {name!r}.",
                fix=f"Return one of {', '.join(KINDS)} for it from parameter_kinds().",
            )
        if parameter.requires_grad:
            parameters[name] = (kind, parameter)
    return parameters


def adamw_for(
    members: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, parts: OptimizerParts
) -> Optimizer:
    """Return an AdamW for (kind, parameter) pairs, in groups with and without decay."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for kind, parameter in members:
        (decayed if kind in DECAYED else plain).append(parameter)
    groups: list[ParameterGroup] = [
        {"params": group, "weight_decay": decay, "lr": config.lr, "peak_lr": config.lr}
        for group, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if group
    ]
    return parts.adamw(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})
