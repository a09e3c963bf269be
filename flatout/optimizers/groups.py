"""Parameter groups: which parameters decay, and under which learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.config.schema import RunConfig
from flatout.config.sections import OptimConfig
from flatout.errors import ConfigError
from flatout.registry import OPTIMIZERS

AdamWFactory = Callable[[list[dict[str, Any]], dict[str, Any]], Optimizer]
"""(parameter groups, keywords lr, betas, eps) -> an AdamW. Each group states its own weight_decay.
"""


@dataclass(frozen=True)
class OptimizerParts:
    """What an optimiser is made of besides its rule: how its work is carried out, which speedups
    exchange.
    """

    adamw: AdamWFactory
    """Makes the AdamW of an optimiser, or of what it leaves to AdamW."""
    newton_schulz: Callable[[Tensor], Tensor]
    """Signature and definition: `flatout.ops.newton_schulz.reference`."""


CALL = "build(model, config, parts)"


def optimizers_of(
    config: RunConfig, model: nn.Module, parts: OptimizerParts
) -> tuple[Optimizer, ...]:
    """Return the optimizers of a run, made by the function that `optim.kind` names.

    Raises: ConfigError when it is called otherwise, or returns something else than a tuple of torch
            optimizers with peak_lr in each group.
    """
    kind, build = config.optim.kind, OPTIMIZERS.get(config.optim.kind)
    as_documented = (
        f"Define {CALL} so that it returns a tuple of torch optimizers, as docs/extend.md shows"
    )
    if isinstance(build, type):
        raise ConfigError(
            f"optim.kind={kind} is a class, not a function that makes the optimizers of a model.",
            fix=f"{as_documented}.",
        )
    try:
        signature(build).bind(model, config.optim, parts)
    except TypeError as error:
        raise ConfigError(
            f"The optimizer {kind} cannot be called as {CALL}: {error}.", fix=f"{as_documented}."
        ) from error
    made = build(model, config.optim, parts)
    if (
        not isinstance(made, tuple | list)
        or not made
        or not all(isinstance(one, Optimizer) for one in made)
    ):
        found = (
            f"a single {type(made).__name__}"
            if isinstance(made, Optimizer)
            else repr(made)
            if not made
            else type(made).__name__
        )
        raise ConfigError(
            f"The optimizer {kind} returned {found}, not a tuple of torch optimizers.",
            fix=f"{as_documented}; of one: (optimizer,).",
        )
    if any("peak_lr" not in group for one in made for group in one.param_groups):
        raise ConfigError(
            f"The optimizer {kind} has a parameter group without peak_lr, which the schedule multiplies.",
            fix='Write each group as {"params": [...], "peak_lr": config.lr}.',
        )
    return tuple(made)


KINDS = ("hidden", "embedding", "head", "vector")
DECAYED = ("hidden", "head")
"""Kinds with weight decay. A tied head is an embedding."""


def named_by_kind(model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """Return {name: (kind, parameter)} of what trains, each parameter once.

    Raises: ConfigError when the model does not state the kind of a parameter, or states an unknown
            kind.
    """
    stated: Any = model  # a LanguageModel, or whatever says the same of its parameters
    kinds = stated.parameter_kinds()
    found = {}
    for name, parameter in model.named_parameters():
        kind = kinds.get(name)
        if kind not in KINDS:
            raise ConfigError(
                f"{type(model).__name__} states the kind {kind!r} for its parameter {name!r}.",
                fix=f"Let parameter_kinds() give one of {', '.join(KINDS)} for it.",
            )
        if parameter.requires_grad:
            found[name] = (kind, parameter)
    return found


def adamw_groups(
    members: Iterable[tuple[str, nn.Parameter]], config: OptimConfig
) -> list[dict[str, Any]]:
    """Return AdamW's groups for (kind, parameter) pairs: those that decay, those that do not; empty
    ones are left out.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for kind, parameter in members:
        (decayed if kind in DECAYED else plain).append(parameter)
    both = [(decayed, config.weight_decay), (plain, 0.0)]
    return [
        {"params": group, "weight_decay": decay, "lr": config.lr, "peak_lr": config.lr}
        for group, decay in both
        if group
    ]
