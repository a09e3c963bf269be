"""AdamW whose moments take a byte a weight: eight bits and a scale a block of 256. Moments of small
tensors stay fp32.

Source: Dettmers et al. 2022, arXiv:2110.02861.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from flatout.errors import ConfigError, MissingPackage
from flatout.models.split_weights import SplitTensor
from flatout.noise import without_noise
from flatout.optimizers.moments import BITSANDBYTES, FP32, TORCHAO, Moments

BLOCK = 256
"""Numbers that share a scale, in both packages."""
SMALLEST = 4_096
"""Weights of the smallest tensor whose moments are narrowed, in both packages."""
TABLE_BYTES = 2 * 256 * 4
"""The two tables that say which number each code stands for."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Torch's names of AdamW's moments, and whether they have a sign."""


def with_torchao(groups: list[dict[str, Any]], keywords: dict[str, Any]) -> Optimizer:
    """Return torchao's AdamW, one compiled kernel for each shape of a large parameter; compiling
    takes seconds a shape, at the first step.

    Raises: MissingPackage with the install line.
    """
    return AdamW8bit(groups, keywords, _package("torchao.optim", "adamw-8bit"))


def with_bitsandbytes(groups: list[dict[str, Any]], keywords: dict[str, Any]) -> Optimizer:
    """Return bitsandbytes' AdamW, one call of a kernel of its own for each parameter, after which
    it waits for the device.

    Raises: MissingPackage with the install line; ConfigError for weights in two parts, which its
            kernels cannot read.
    """
    if any(isinstance(parameter, SplitTensor) for group in groups for parameter in group["params"]):
        raise ConfigError(
            "The kernels of adamw-8bit-bitsandbytes read fp32 weights, and bf16-weights keeps them in two parts.",
            fix="Use adamw-8bit with bf16-weights, or leave one of the two out of speedups.",
        )
    base: Any = _package("bitsandbytes.optim", "adamw-8bit-bitsandbytes").AdamW8bit

    class OwnTables(base):  # type: ignore[misc]
        """bitsandbytes gives the moments of all parameters one table of codes; a checkpoint's
        tensors are each their own.
        """

        def moments_of(self, _parameter: Tensor) -> Moments:
            """Return what is kept for a parameter.

            Shapes: _parameter of any shape.
            """
            return BITSANDBYTES

        def init_state(self, group: Any, parameter: Tensor, *numbers: int) -> None:
            """Make a parameter's state, its tables copied."""
            super().init_state(group, parameter, *numbers)
            state = self.state[parameter]
            state.update({key: state[key].clone() for key in ("qmap1", "qmap2") if key in state})

    made: Optimizer = OwnTables(groups, **keywords)
    return made


def torchao_bytes(num_weights: int) -> int:
    """Return what torchao keeps for a tensor of so many weights."""
    return (
        2 * num_weights + 2 * 4 * (num_weights // BLOCK) + TABLE_BYTES
        if _fits(num_weights)
        else 8 * num_weights
    )


def bitsandbytes_bytes(num_weights: int) -> int:
    """Return what bitsandbytes keeps for a tensor of so many weights."""
    return (
        2 * num_weights + 2 * 4 * -(-num_weights // BLOCK) + TABLE_BYTES
        if num_weights >= SMALLEST
        else 8 * num_weights
    )


class AdamW8bit(Optimizer):
    """torchao's AdamW for the tensors it narrows, torch's fused one for the rest; one state of
    plain tensors, as a checkpoint holds them.

    A narrowed moment is its codes, under torch's own name for it, and their scales, under
    NAME_scale; the tables of codes follow from the package. The rate goes to the compiled kernels
    as a tensor, so that another rate compiles nothing anew.
    """

    def __init__(
        self, groups: list[dict[str, Any]], keywords: dict[str, Any], package: Any
    ) -> None:
        super().__init__(groups, keywords)
        self._state_class: Any = importlib.import_module(
            "torchao.optim.subclass_8bit"
        ).OptimState8bit
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._narrow = self._made(package.AdamW8bit, keywords, narrowed=True)
        self._wide = self._made(partial(AdamW, fused=True), keywords, narrowed=False)
        if self._wide is not None:
            self._wide.state = self.state

    def _made(
        self, make: Callable[..., Optimizer], keywords: dict[str, Any], *, narrowed: bool
    ) -> Optimizer | None:
        members = [
            (group, [p for p in group["params"] if _fits(p.numel()) is narrowed])
            for group in self.param_groups
        ]
        members = [(group, parameters) for group, parameters in members if parameters]
        if not members:
            return None
        made = make(
            [
                {"params": parameters, "weight_decay": group["weight_decay"]}
                for group, parameters in members
            ],
            **keywords,
        )
        self._groups += zip((group for group, _ in members), made.param_groups, strict=True)
        return made

    def moments_of(self, parameter: Tensor) -> Moments:
        """Return what is kept for a parameter.

        Shapes: parameter of any shape.
        """
        return TORCHAO if _fits(parameter.numel()) else FP32

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own, inner in self._groups:
            inner.update({key: own[key] for key in ("betas", "eps", "weight_decay")})
            inner["lr"] = (
                inner["lr"].fill_(own["lr"]) if isinstance(inner["lr"], Tensor) else own["lr"]
            )
        if self._wide is not None:
            self._wide.step()
        if self._narrow is not None:
            self._narrow_step(self._narrow)
        return loss

    def _narrow_step(self, inner: Optimizer) -> None:
        parameters = [
            p for group in inner.param_groups for p in group["params"] if p.grad is not None
        ]
        for parameter in parameters:
            if parameter in self.state and self.state[parameter]["step"] is not inner.state[
                parameter
            ].get("step"):
                inner.state[parameter] = self._together(self.state[parameter])
        with (
            warnings.catch_warnings()
        ):  # that torchao's states do not say what a compiled kernel is filed under
            warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")
            inner.step()
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = _apart(inner.state[parameter])

    def _together(self, own: dict[str, Tensor]) -> dict[str, Any]:
        inner: dict[str, Any] = {"step": own["step"]}
        for name, signed in MOMENTS.items():
            table = self._state_class.zeros((BLOCK,), signed, BLOCK, own[name].device).qmap
            inner[name] = self._state_class(
                own[name], own[f"{name}_scale"], table, signed, dtype=torch.float32
            )
        return inner


def _apart(inner: dict[str, Any]) -> dict[str, Tensor]:
    own: dict[str, Tensor] = {"step": inner["step"]}
    for name in MOMENTS:
        own |= {name: inner[name].codes, f"{name}_scale": inner[name].scale}
    return own


def _fits(num_weights: int) -> bool:
    """torchao's own rule of what it narrows."""
    return num_weights >= SMALLEST and num_weights % BLOCK == 0


def _package(module: str, extra: str) -> Any:
    try:
        with without_noise():
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackage(
            f"The speedup {extra!r} takes the package {package}, which is not installed.",
            fix=f'Install it: `pip install "flatout[{package if package == "bitsandbytes" else extra}]"`.',
        ) from error
