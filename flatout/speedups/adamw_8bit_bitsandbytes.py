"""AdamW with 8-bit moments, from bitsandbytes.

Source: Dettmers et al. 2022, arXiv:2110.02861.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.assembly.conditions import load_package, without_package
from flatout.assembly.recipe import Off, Promise, Speedup
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.hardware import Machine

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from flatout.optimizers.groups import AdamWSettings, ParameterGroup
    from flatout.optimizers.moments import Moments

NAME = "adamw-8bit-bitsandbytes"
BLOCK = 256
"""Number of moments that share a scale."""
SMALLEST = 4_096
"""Number of weights in the smallest tensor whose moments are quantised."""
TABLE_BYTES = 2 * 256 * 4
"""Size of the two tables that map codes to values."""


def adamw_8bit(groups: list[ParameterGroup], keywords: AdamWSettings) -> Optimizer:
    """Return bitsandbytes' AdamW: one kernel per parameter, after which it waits for the device.

    Raises: MissingPackage with the install line; ConfigError for weights in two parts, which its
            kernels cannot read.
    """
    from flatout.models.split_weights import SplitTensor
    from flatout.optimizers.moments import BITSANDBYTES

    if any(isinstance(parameter, SplitTensor) for group in groups for parameter in group["params"]):
        raise ConfigError(
            f"The kernels of {NAME} read fp32 weights, and bf16-weights keeps them in two parts.",
            fix="Use adamw-8bit with bf16-weights, or leave one of the two out of speedups.",
        )
    base: Any = load_package("bitsandbytes.optim", NAME, extra="bitsandbytes").AdamW8bit

    class OwnTables(base):  # type: ignore[misc]
        """Gives each parameter its own code tables: tensors in a checkpoint cannot share memory."""

        def moments_of(self, _parameter: Tensor) -> Moments:
            """Return the kind of moments kept for a parameter.

            Shapes: _parameter of any shape.
            """
            return BITSANDBYTES

        def init_state(self, group: ParameterGroup, parameter: Tensor, *numbers: int) -> None:
            """Create a parameter's state with copies of the tables."""
            super().init_state(group, parameter, *numbers)
            state = self.state[parameter]
            state.update({key: state[key].clone() for key in ("qmap1", "qmap2") if key in state})

    made: Optimizer = OwnTables(groups, **keywords)
    return made


def moment_bytes(num_weights: int) -> int:
    """Return the bytes of the moments of a tensor with this many weights."""
    if num_weights < SMALLEST:
        return 8 * num_weights
    return 2 * num_weights + 2 * 4 * -(-num_weights // BLOCK) + TABLE_BYTES


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if against := without_package("bitsandbytes", extra="bitsandbytes"):
        return against
    if config.parallel.shard > 1:
        return "Its kernels do not support sharded weights: set parallel.shard=1, or leave it out."
    return None


SPEEDUP = Speedup(
    name=NAME,
    fills={"optimizer": adamw_8bit, "moments": moment_bytes},
    saves="memory: as adamw-8bit, without compiling; it waits for the GPU after every parameter",
    promise=Promise.statistical(),
    why_not=_why_not,
    rank=730,
    auto={
        "cpu": Off("it is slower on a CPU; use adamw-8bit where memory is short"),
        "cuda": Off("use it where memory is short and compiling takes too long"),
    },
)
