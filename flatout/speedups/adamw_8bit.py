"""AdamW with 8-bit moments, from torchao."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import (
    Off,
    Speedup,
    Tolerance,
    first_of,
    load_package,
    needs_package,
    without_compiler,
)
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

if TYPE_CHECKING:
    from flatout.optim.adamw_8bit import AdamW8bit
    from flatout.optim.groups import AdamWSettings, ParameterGroup


def adamw_8bit(groups: list[ParameterGroup], keywords: AdamWSettings) -> AdamW8bit:
    """Return AdamW with torchao's moments.

    Raises: MissingPackage with the install line.
    """
    from flatout.optim.adamw_8bit import AdamW8bit

    codec = load_package("torchao.optim.quant_utils", "adamw-8bit")
    return AdamW8bit(groups, keywords, codec)


def _sharded(_machine: Machine, config: RunConfig) -> str | None:
    if not config.parallel.is_sharded:
        return None
    return (
        "Checkpoints do not support sharded or offloaded 8-bit moments: remove parallel.shard, "
        "parallel.tensor, parallel.pipeline and parallel.offload, or adamw-8bit."
    )


def apply(parts: Parts) -> None:
    """Keep the moments in 8 bits."""
    parts.optimizer = adamw_8bit
    parts.moments = named("flatout.optim.adamw_8bit:moment_bytes")


SPEEDUP = Speedup(
    name="adamw-8bit",
    apply=apply,
    saves="memory: AdamW's moments take 2 bytes per weight instead of 8, but those of small "
    "tensors stay in fp32",
    tolerance=Tolerance.statistical(),
    why_not=first_of(needs_package("torchao", extra="adamw-8bit"), without_compiler, _sharded),
    rank=720,
    auto={
        "cpu": Off("it is slower on a CPU: use it where memory is short"),
        "cuda": Off("use it where memory is short"),
    },
)
