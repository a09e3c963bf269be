"""Rotary positions, for whole heads or a part of each, and their wavelengths for long sequences.

Letters: T tokens, C head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.ops import float64_device


class Rotary(nn.Module):
    """Rotates pairs of a head's components by an angle proportional to the position.

    Scores then depend on distances only. Component i is paired with i + C/2. If only `num_rotated`
    components rotate, they are the first num_rotated / 2 of each half. The tables are fp32 for any
    dtype of the model, recomputed when the model moves to a device, and not part of checkpoints.

    Source: Su et al. 2021, arXiv:2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        base: float,
        *,
        num_rotated: int | None,
        scaling: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_rotated = num_rotated or head_dim
        self.max_seq_len = max_seq_len
        self.base = base
        self.scaling = scaling
        cos, sin = self._tables(torch.get_default_device())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the factors for a vector and for its swapped halves.

        The first table repeats each cosine, the second each sine with its first half negated.
        """
        exact = float64_device(device)
        exponent = torch.arange(0, self.num_rotated, 2, device=exact, dtype=torch.float64)
        exponent = exponent / self.num_rotated
        frequency = self.scaling(self.base**-exponent)
        frequency = functional.pad(frequency, (0, (self.head_dim - self.num_rotated) // 2))
        position = torch.arange(self.max_seq_len, device=exact, dtype=torch.float64)
        angle = position[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return tables[0].float().to(device), tables[1].float().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cos, self.sin = self._tables(self.cos.device)
        return self

    def forward(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the tables that `ops.heads` takes, for positions from `start` to before `end`.

        Returns: (cos_TC, sin_TC).
        """
        return self.cos[start:end], self.sin[start:end]


def unscaled(frequency: Tensor) -> Tensor:
    """Return the frequencies unchanged.

    Shapes:  any.
    """
    return frequency


def linear(frequency: Tensor, *, factor: float) -> Tensor:
    """Return the frequencies divided by `factor`, as if positions were closer together.

    Shapes:  any.
    Source:  Chen et al. 2023, arXiv:2306.15595.
    """
    return frequency / factor


def llama3(
    frequency: Tensor, *, factor: float, low_factor: float, high_factor: float, original_len: int
) -> Tensor:
    """Return the low frequencies divided by `factor`, with a smooth transition to the high ones.

    A frequency with less than `low_factor` periods in `original_len` tokens is low, one with more
    than `high_factor` is high and unchanged.

    Shapes:  any.
    Source:  Llama Team 2024, arXiv:2407.21783; the formula is that of Llama 3.1's published code.
    """
    periods = original_len * frequency / (2 * math.pi)
    unchanged = ((periods - low_factor) / (high_factor - low_factor)).clamp(0, 1)
    return frequency * (unchanged + (1 - unchanged) / factor)
