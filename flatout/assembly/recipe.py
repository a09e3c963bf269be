"""Recipe: the exchangeable parts of a run.

A run is a set of slots, each with one value, and an ordered tuple of model transforms. `baseline()`
fills every slot the plain way people write it. A `Speedup` is one value that fills slots or adds a
transform; `with_speedup` lays it over a recipe. Nothing here imports torch: parts that need it are
named with `lazy` and loaded when the run is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.hardware import Machine
from flatout.registry import MODELS, load_reference

if TYPE_CHECKING:
    from flatout.assembly.memory import Workload

STAGES = (
    "tensor",
    "low-precision",
    "checkpointing",
    "compiler-options",
    "compile",
    "cuda-graphs",
    "shard",
)
"""The one right order in which transforms wrap a model; `shard` belongs to config.parallel."""


@dataclass(frozen=True)
class Lazy:
    """A part of a recipe by name, `package.module:attribute`, imported when the run is built."""

    reference: str

    def load(self) -> Any:
        """Import and return the part."""
        return load_reference(self.reference)


def lazy(reference: str) -> Any:
    """Name a part that needs torch; typed as the part itself, which it becomes when the run is
    built.
    """
    return Lazy(reference)


@dataclass(frozen=True)
class Precision:
    """Arithmetic of the matrix products. Weights, gradients and optimiser state stay fp32."""

    name: str
    """fp32, bf16 or fp16: what the resolved config says."""
    autocast: str | None = None
    """torch dtype of the products; None leaves them in fp32."""
    loss_scale: float | None = None
    """Initial loss scale; None where gradients cannot underflow."""

    def dtype(self) -> Any:
        """Return the torch dtype of the products, or None."""
        import torch

        return getattr(torch, self.autocast) if self.autocast else None

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which a model is called on `cpu` or `cuda`."""
        import torch

        return torch.autocast(device_type, dtype=self.dtype()) if self.autocast else nullcontext()


MODEL_OPS = frozenset({"ops.attention", "ops.heads", "ops.linear", "ops.scan", "ops.folding"})
"""Slots of functions that a model may call or not; its file states which, as USES."""
FP32 = Precision("fp32")


class ImmediateReadback:
    """Reads a step's figures from the device at once, every step: plain, and the device waits for
    the host.
    """

    def __init__(self) -> None:
        self._read: list[tuple[int, dict[str, float]]] = []

    def push(self, step: int, values: Mapping[str, Any], *, due: bool) -> None:
        """Read `values` (name to 0-D tensor) of `step`; kept only when `due`."""
        figures = {name: float(value) for name, value in values.items()}
        if due:
            self._read.append((step, figures))

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return what has been read since the last call; nothing is ever pending here, so `flush`
        changes nothing.
        """
        read, self._read = self._read, []
        return read


PLAIN_ROWS, PLAIN_TOKENS = 12, 131_072
"""The micro-batch that people write: nanoGPT's 12 rows, and no more tokens than 4 rows of 32,768.
"""
USED_MEMORY = 0.8
"""Share of the memory that the estimate of a micro-batch may fill."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """What the choice of the micro-batch may look at."""

    workload: Workload
    rows_per_rank: int
    """Windows of one optimiser step on one rank; the answer divides it."""
    device: str
    memory_bytes: int
    """What one rank may use, all of it."""

    def divisors(self, at_most: int) -> Iterator[int]:
        """Yield the rows, `at_most` and fewer, that divide a rank's share of the step, the most
        first.
        """
        yield from (
            rows
            for rows in range(min(self.rows_per_rank, at_most), 0, -1)
            if self.rows_per_rank % rows == 0
        )

    def fits(self, rows: int) -> bool:
        """Say whether the memory holds a micro-batch of so many rows."""
        from flatout.assembly.memory import estimate

        return estimate(self.workload, rows).total <= USED_MEMORY * self.memory_bytes


def rows_people_write(plan: MicroBatchPlan) -> int:
    """Return the most rows, up to 12 and to 131,072 tokens, that divide the step and fit the
    memory; one row is never refused.
    """
    at_most = max(min(PLAIN_ROWS, PLAIN_TOKENS // plan.workload.seq_len), 1)
    return next(rows for rows in plan.divisors(at_most) if rows == 1 or plan.fits(rows))


def as_it_is() -> None:
    """Leave the process's allocator as it comes."""


def with_every_micro_batch(_model: Any, _is_last: bool) -> AbstractContextManager[Any]:
    """Let processes exchange gradients in every micro-batch."""
    return nullcontext()


def dropped(parameters: Iterable[Any]) -> None:
    """Forget the gradients; the next backward pass brings tensors of its own."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def as_python_collects() -> Iterator[Callable[[int], None]]:
    """Leave Python's collector of cycles as it is; what is yielded is told of every step, and does
    nothing.
    """
    yield lambda _step: None


PLAIN: Mapping[str, Any] = MappingProxyType(
    {
        "windows": lazy("flatout.data.load.baseline:TokenisingWindows"),
        "batching": lazy("flatout.data.load.batches:WindowSteps"),
        "feed": lazy("flatout.data.load.feed:DirectFeed"),
        "micro_batch": rows_people_write,
        "matmul": "highest",
        "precision": FP32,
        "ops.attention": lazy("flatout.ops.attention:reference"),
        "ops.linear": lazy("flatout.ops.linear:reference"),
        "ops.heads": lazy("flatout.ops.heads:reference"),
        "ops.scan": lazy("flatout.ops.scan:reference"),
        "ops.folding": lazy("flatout.ops.folding:reference"),
        "ops.cross_entropy": lazy("flatout.ops.cross_entropy:fused"),
        "ops.newton_schulz": lazy("flatout.ops.newton_schulz:reference"),
        "optimizer": lazy("flatout.optimizers.adamw:per_parameter"),
        "moments": lazy("flatout.assembly.memory:two_in_fp32"),
        "activations": "all",
        "compilation": "none",
        "gathers": None,
        "exchange": with_every_micro_batch,
        "gradients": dropped,
        "logging": ImmediateReadback,
        "checkpointing": lazy("flatout.training.checkpoint.savers:InTheLoop"),
        "allocator": as_it_is,
        "collector": as_python_collects,
        "convolutions": nullcontext,
    }
)
"""Every slot with its plain value.

windows: where a window's tokens come from. batching: which rows make a step. feed: how they reach
the device. micro_batch: rows per device when `auto`. matmul: torch's float32 matmul precision.
precision: of the products. ops.*: the model's functions and Muon's; the plain loss is torch's own
cross_entropy on whole logits, which is what people write. optimizer: how AdamW's update is carried
out. moments: the bytes that AdamW keeps for a tensor of so many weights. activations: what blocks
keep between forward and backward, in words; a transform sees to it. compilation: what is compiled
as one, likewise. gathers: the torch dtype in which fully_shard collects the blocks' weights; None
is their own. exchange: (model, is it the step's last micro-batch) -> the context of a micro-batch,
in which processes exchange gradients or wait with it. gradients: clears those of the parameters it
is given, after each step. logging: when figures are read from the device. checkpointing: whether
the loop waits while its state is written. allocator: called once, before anything is built.
collector: the context of the loop, which yields what is called after every step. convolutions: the
context of the loop in which cuDNN chooses its algorithms.
"""


@dataclass(frozen=True)
class Transform:
    """A change to the model itself, applied in the order of STAGES."""

    stage: str
    apply: Callable[[Any, Any], Any]
    """(model, mesh) -> model."""


@dataclass(frozen=True)
class Promise:
    """What a speedup may change about the losses."""

    kind: Literal["exact", "rounding", "statistical"]
    rtol: float = 0.0
    """Largest relative difference of a loss on the same batches; rounding only."""

    @classmethod
    def exact(cls) -> Promise:
        """Bit-equal losses on the same batches, wherever two runs of one command have them: on a
        GPU with train.deterministic=true.
        """
        return cls("exact")

    @classmethod
    def rounding(cls, *, rtol: float) -> Promise:
        """Losses on the same batches differ by at most `rtol`, relative."""
        return cls("rounding", rtol)

    @classmethod
    def statistical(cls) -> Promise:
        """Other batches or other arithmetic; the final loss lies within the spread over seeds."""
        return cls("statistical")

    def holds(self, fast: Sequence[float], plain: Sequence[float]) -> bool:
        """Say whether two runs' losses, step by step, keep an exact or a rounding promise.

        An exact one is judged by runs that repeat to the bit: on a CPU, or with
        train.deterministic=true. A statistical promise cannot be judged from two runs; the
        comparison over seeds is `bench`'s.
        """
        if len(fast) != len(plain):
            return False
        return all(abs(a - b) <= self.rtol * abs(b) for a, b in zip(fast, plain, strict=True))


def always(_machine: Machine, _config: RunConfig) -> str | None:
    """Return None: the speedup runs anywhere."""
    return None


def uses_gpu(machine: Machine, config: RunConfig) -> bool:
    """Say whether the run is on an NVIDIA GPU, as far as the configuration and the machine tell."""
    return (
        bool(machine.gpus)
        if config.train.device == "auto"
        else config.train.device.startswith("cuda")
    )


def gpu_below(machine: Machine, capability: tuple[int, int], what: str) -> str | None:
    """Return why `what`, which needs at least a compute capability, cannot run on this machine's
    oldest GPU; None when it can.
    """
    too_old = [gpu for gpu in machine.gpus if gpu.compute_capability < capability]
    if not too_old:
        return None
    have = ".".join(str(part) for part in too_old[0].compute_capability)
    return f"{what} needs compute capability {capability[0]}.{capability[1]}; the {too_old[0].name} has {have}."


@dataclass(frozen=True)
class Speedup:
    """One optimisation: one value in one file of flatout/speedups."""

    name: str
    """The file's name, with - for _."""
    saves: str
    """One line on what it saves."""
    promise: Promise
    """What it may change about the losses."""
    fills: Mapping[str, Any] = field(default_factory=dict)
    """Slots it fills."""
    transform: Transform | None = None
    """What it does to the model."""
    needs: tuple[str, ...] = ()
    """Speedups without which it does not work."""
    compiles: bool = False
    """Whether it hands code to torch.compile, which is then called once before training: where that
    fails, all that compile are off.
    """
    why_not: Callable[[Machine, RunConfig], str | None] = always
    """A sentence on why it cannot or should not run here, or None. Whether the model has a use for
    it is found apart from that.
    """
    predicted: str | None = None
    """The gain expected from arithmetic, up to the first colon or full stop; then that arithmetic.
    Written before anything is measured.
    """

    def reason_against(self, machine: Machine, config: RunConfig) -> str | None:
        """Return why it cannot or should not run here: all it fills are functions that the model
        never calls, or `why_not`.
        """
        used = MODELS.stated(config.model.kind, "USES")
        if used == () and (MODEL_OPS | {"ops.cross_entropy"}) & self.fills.keys():
            return f"The model {config.model.kind!r} calls none of the functions that it exchanges."
        if (
            used is not None
            and self.fills
            and self.fills.keys() <= MODEL_OPS
            and not {f"ops.{name}" for name in used} & self.fills.keys()
            and not self.transform
        ):
            return f"The model {config.model.kind!r} makes no use of {' and '.join(self.fills)}."
        return self.why_not(machine, config)


@dataclass(frozen=True)
class Recipe:
    """A value for every slot, and the transforms in the order in which they were added."""

    slots: Mapping[str, Any]
    filled_by: Mapping[str, str] = field(default_factory=dict)
    """Which speedup filled a slot; a slot is filled at most once."""
    transforms: tuple[Transform, ...] = ()

    def part(self, slot: str) -> Any:
        """Return the slot's value, imported if it is lazy."""
        value = self.slots[slot]
        return value.load() if isinstance(value, Lazy) else value

    def with_speedup(self, speedup: Speedup) -> Recipe:
        """Return this recipe with one speedup more.

        Raises: ConfigError when another speedup already filled one of its slots.
        """
        for slot in speedup.fills:
            if slot in self.filled_by:
                first = self.filled_by[slot]
                raise ConfigError(
                    f"The speedups {first!r} and {speedup.name!r} both fill the slot {slot!r}.",
                    fix="Leave out one of the two.",
                )
            if slot not in self.slots:
                raise ConfigError(
                    f"The speedup {speedup.name!r} fills {slot!r}, which is no slot.",
                    fix=f"Use one of: {', '.join(self.slots)}.",
                )
        return replace(
            self,
            slots={**self.slots, **speedup.fills},
            filled_by={**self.filled_by, **dict.fromkeys(speedup.fills, speedup.name)},
            transforms=self.transforms + ((speedup.transform,) if speedup.transform else ()),
        )

    def ordered_transforms(self) -> list[Transform]:
        """Return the transforms in the order in which they must wrap the model."""
        return sorted(self.transforms, key=lambda transform: STAGES.index(transform.stage))


def baseline() -> Recipe:
    """Return the honest slow run: every slot filled the plain way, no transform."""
    return Recipe(slots=dict(PLAIN))
