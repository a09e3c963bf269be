"""AdamW whose moments take one byte per weight: 8-bit codes, and one scale per block of 256.

The moments of small tensors stay fp32.

Source: Dettmers et al. 2022, arXiv:2110.02861.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from flatout.assembly.conditions import load_package
from flatout.optimizers.groups import AdamWSettings, ParameterGroup
from flatout.optimizers.moments import FP32, TORCHAO, Moments

BLOCK = 256
"""Number of moments that share a scale."""
SMALLEST = 4_096
"""Number of weights in the smallest tensor whose moments are quantised."""
TABLE_BYTES = 2 * 256 * 4
"""Size of the two tables that map codes to values."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""torch's names of AdamW's moments, and whether they are signed."""


def adamw_8bit(groups: list[ParameterGroup], keywords: AdamWSettings) -> Optimizer:
    """Return torchao's AdamW, with one compiled kernel per shape of a large parameter.

    Cost:   seconds of compilation per shape, at the first step.
    Raises: MissingPackage with the install line.
    """
    return AdamW8bit(
        groups, keywords, load_package("torchao.optim", "adamw-8bit", extra="adamw-8bit")
    )


def moment_bytes(num_weights: int) -> int:
    """Return the bytes of the moments of a tensor with this many weights."""
    if not _is_quantised(num_weights):
        return 8 * num_weights
    return 2 * num_weights + 2 * 4 * (num_weights // BLOCK) + TABLE_BYTES


class AdamW8bit(Optimizer):
    """torchao's AdamW for the tensors it quantises, torch's fused one for the rest.

    The state contains plain tensors, as a checkpoint does. A quantised moment is stored as codes,
    under torch's own name, and scales, under NAME_scale; the code tables come from the package. The
    learning rate is passed to the compiled kernels as a tensor, so that a new rate does not
    recompile them.
    """

    def __init__(
        self, groups: list[ParameterGroup], keywords: AdamWSettings, package: ModuleType
    ) -> None:
        super().__init__(groups, dict(keywords))
        self._state_class: Any = importlib.import_module(
            "torchao.optim.subclass_8bit"
        ).OptimState8bit
        self._groups: list[tuple[ParameterGroup, ParameterGroup]] = []
        self._quantised = self._make_inner(package.AdamW8bit, keywords, quantised=True)
        self._fp32 = self._make_inner(partial(AdamW, fused=True), keywords, quantised=False)
        if self._fp32 is not None:
            self._fp32.state = self.state

    def _make_inner(
        self, make: Callable[..., Optimizer], keywords: AdamWSettings, *, quantised: bool
    ) -> Optimizer | None:
        members = [
            (group, [p for p in group["params"] if _is_quantised(p.numel()) is quantised])
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
        """Return the kind of moments kept for a parameter.

        Shapes: parameter of any shape.
        """
        return TORCHAO if _is_quantised(parameter.numel()) else FP32

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
        if self._fp32 is not None:
            self._fp32.step()
        if self._quantised is not None:
            self._quantised_step(self._quantised)
        return loss

    def _quantised_step(self, inner: Optimizer) -> None:
        parameters = [
            p for group in inner.param_groups for p in group["params"] if p.grad is not None
        ]
        for parameter in parameters:
            if parameter in self.state and self.state[parameter]["step"] is not inner.state[
                parameter
            ].get("step"):
                inner.state[parameter] = self._to_torchao(self.state[parameter])
        with warnings.catch_warnings():
            # torchao's states do not define the key under which a compiled kernel is cached.
            warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")
            inner.step()
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = _from_torchao(inner.state[parameter])

    def _to_torchao(self, own: dict[str, Tensor]) -> dict[str, Any]:
        inner: dict[str, Any] = {"step": own["step"]}
        for name, signed in MOMENTS.items():
            table = self._state_class.zeros((BLOCK,), signed, BLOCK, own[name].device).qmap
            inner[name] = self._state_class(
                own[name], own[f"{name}_scale"], table, signed, dtype=torch.float32
            )
        return inner


def _from_torchao(inner: dict[str, Any]) -> dict[str, Tensor]:
    own: dict[str, Tensor] = {"step": inner["step"]}
    for name in MOMENTS:
        own |= {name: inner[name].codes, f"{name}_scale": inner[name].scale}
    return own


def _is_quantised(num_weights: int) -> bool:
    """Return whether torchao quantises the moments of a tensor, by its own rule."""
    return num_weights >= SMALLEST and num_weights % BLOCK == 0
