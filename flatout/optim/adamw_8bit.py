"""AdamW whose moments take one byte per weight: 8-bit codes, and one scale per block of 256.

The moments of small tensors stay fp32.

Source: Dettmers et al. 2022, arXiv:2110.02861.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import disable_cache_limit
from torch.optim import AdamW, Optimizer

from flatout.optim.groups import AdamWSettings, ParameterGroup
from flatout.optim.moments import FP32, TORCHAO, Moments
from flatout.optim.step_guard import step_with_flag

BLOCK = 256
"""Number of moments that share a scale."""
SMALLEST = 4_096
"""Number of weights in the smallest tensor whose moments are quantised."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""torch's names of AdamW's moments, and whether they are signed."""


def moment_bytes(num_weights: int) -> int:
    """Return the bytes of the moments of a tensor with this many weights."""
    if not _is_quantised(num_weights):
        return 8 * num_weights
    return 2 * num_weights + 2 * 4 * (num_weights // BLOCK)


class AdamW8bit(Optimizer):
    """AdamW with torchao's moments for the tensors it quantises, torch's fused one for the rest.

    The state contains plain tensors, as a checkpoint does. A quantised moment is stored as codes,
    under torch's own name, and scales, under NAME_scale. The code tables come from the package. A
    step changes nothing if the attribute `found_inf` is 1, see `step_with_flag`.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, groups: list[ParameterGroup], keywords: AdamWSettings, codec: ModuleType
    ) -> None:
        """`codec` is torchao's module of functions that turn moments into codes and back."""
        super().__init__(groups, dict(keywords) | {"fused": True})  # so `step` is on the device
        self._codec = codec
        self._update = torch.compile(_update_with(codec), fullgraph=True, dynamic=False)
        self._tables: dict[torch.device, list[Tensor]] = {}
        """The values of the codes of both moments."""
        small = [
            {"params": [p for p in group["params"] if not _is_quantised(p.numel())]}
            for group in self.param_groups
        ]
        self._fp32 = AdamW(small, **keywords, fused=True)
        self._fp32.state = self.state

    def moments_of(self, parameter: Tensor) -> Moments:
        """Return the kind of moments kept for a parameter.

        Shapes: parameter of any shape.
        """
        return TORCHAO if _is_quantised(parameter.numel()) else FP32

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Cost: seconds of compilation per shape of a quantised parameter, at the first step.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group, own in zip(self.param_groups, self._fp32.param_groups, strict=True):
            own.update({key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})
        if skip is None:
            self._fp32.step()
        else:
            step_with_flag(self._fp32, skip)
        # Each shape compiles once. torch's limit is for code that recompiles again and again.
        with disable_cache_limit():
            for group in self.param_groups:
                rate = torch.tensor(group["lr"])  # a tensor, so that a new rate does not recompile
                settings = (rate, *group["betas"], group["weight_decay"], group["eps"])
                for p in group["params"]:
                    if p.grad is not None and _is_quantised(p.numel()):
                        self._step_quantised(p, settings, skip)
        return loss

    def _step_quantised(self, p: Tensor, settings: tuple[Any, ...], skip: Tensor | None) -> None:
        """Update one parameter. Its moments are zeros before the first update."""
        device = p.device
        if device not in self._tables:
            self._tables[device] = [
                torch.tensor(self._codec.create_dynamic_map(signed=signed), device=device)
                for signed in MOMENTS.values()
            ]
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=device)
            for name in MOMENTS:
                state[name] = torch.zeros(p.shape, dtype=torch.uint8, device=device)
                state[f"{name}_scale"] = torch.zeros(p.numel() // BLOCK, device=device)
        flag = torch.zeros((), device=device) if skip is None else skip
        state["step"] += 1
        moments = [
            (state[name], state[f"{name}_scale"], table)
            for name, table in zip(MOMENTS, self._tables[device], strict=True)
        ]
        self._update(p.detach(), p.grad, moments, state["step"], flag, *settings)
        state["step"] -= flag


def _update_with(codec: ModuleType) -> Callable[..., None]:
    """Return the update of one tensor, for compilation into one kernel."""

    def update(
        weight: Tensor,
        gradient: Tensor,
        moments: list[tuple[Tensor, Tensor, Tensor]],
        step: Tensor,
        skip: Tensor,
        rate: Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
    ) -> None:
        """Take a step of AdamW in place: weight, codes and scales. Nothing where `skip` is 1."""
        stays = skip > 0
        mean, square = [
            codec.dequant_with_qmap(codes, table, scale) for codes, scale, table in moments
        ]
        mean = mean.lerp(gradient, 1 - beta1)
        square = square.lerp(gradient.square(), 1 - beta2)
        root = square.sqrt() / (1 - beta2**step).sqrt() + eps
        before = weight.float()
        decayed = before - rate * weight_decay * before
        moved = decayed - rate * (mean / (1 - beta1**step)) / root
        weight.copy_(torch.where(stays, before, moved))
        for (codes, scale, table), moment in zip(moments, (mean, square), strict=True):
            scaled, new_scale = codec.scale_tensor(moment, BLOCK)
            new_codes = codec.quantize_8bit_with_qmap(scaled, table)
            codes.copy_(torch.where(stays, codes, new_codes))
            scale.copy_(torch.where(stays, scale, new_scale))

    return update


def _is_quantised(num_weights: int) -> bool:
    """Return whether torchao quantises the moments of a tensor, by its own rule."""
    return num_weights >= SMALLEST and num_weights % BLOCK == 0
