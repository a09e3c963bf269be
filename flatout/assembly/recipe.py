"""Recipe: the exchangeable parts of a run.

A recipe has one slot per part, each with its plain value until a `Speedup` fills it, which
`with_speedup` does. Nothing here imports torch: parts that need it are referenced with `lazy` and
imported at first access.
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flatout.config.registry import MODELS, SPEEDUPS, load_reference
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, MissingPackage
from flatout.hardware.machine import Machine

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from flatout.data.load.batches import BatchPlan, SequenceReader, StepReader
    from flatout.data.load.loader import DirectLoader, PrefetchLoader
    from flatout.data.store.mix import MixedSplit
    from flatout.data.store.shards import Split
    from flatout.data.tokenizers import Tokenizer
    from flatout.distributed.mesh import Mesh
    from flatout.models.language_model import LanguageModel
    from flatout.ops import Ops
    from flatout.optim.groups import AdamWFactory


PLAIN_ROWS, PLAIN_TOKENS = 12, 131_072
"""The usual hand-written micro-batch: nanoGPT's 12 rows, at most the tokens of 4 x 32,768."""


@dataclass(frozen=True)
class Precision:
    """Arithmetic of matmuls. Weights, gradients and optimizer state stay in fp32."""

    name: Literal["fp32", "bf16", "fp16"]
    """The value of train.precision in the resolved config."""
    autocast: str | None = None
    """torch dtype of the matmuls. None leaves them in fp32."""
    loss_scale: float | None = None
    """Initial loss scale. None where gradients cannot underflow."""

    def dtype(self) -> torch.dtype | None:
        """Return the torch dtype of the matmuls, or None."""
        import torch

        return getattr(torch, self.autocast) if self.autocast else None

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context for calling a model on `cpu` or `cuda`."""
        import torch

        return torch.autocast(device_type, dtype=self.dtype()) if self.autocast else nullcontext()


FP32 = Precision("fp32")


class Readback(Protocol):
    """Brings metrics from the device to the host."""

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Take the metrics of a step (name to 0-D tensor). Only those that are `due` are kept.

        Shapes: each value is 0-D.
        """

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the metrics that have reached the host. With `flush`, wait for all of them."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """The inputs to the choice of a micro-batch."""

    seq_len: int
    rows_per_rank: int
    """Sequences per optimizer step on one rank, a multiple of the chosen rows."""
    device: str
    fits: Callable[[int], bool]
    """Whether a micro-batch of that many rows fits into memory, by estimate."""
    most_rows: Callable[[], int]
    """The most rows that fit. Raises HardwareError when a single one does not."""


def divisors(number: int, at_most: int) -> Iterator[int]:
    """Yield the divisors of a number up to `at_most`, largest first."""
    yield from (one for one in range(min(number, at_most), 0, -1) if number % one == 0)


def rows_people_write(plan: MicroBatchPlan) -> int:
    """Return the largest row count, up to 12 and 131,072 tokens, that divides the step and fits."""
    at_most = max(min(PLAIN_ROWS, PLAIN_TOKENS // plan.seq_len), 1)
    found = divisors(plan.rows_per_rank, at_most)
    return next(rows for rows in found if rows == 1 or plan.fits(rows))


class ImmediateReadback:
    """Reads the metrics from the device at every step, which makes the device wait for the host."""

    def __init__(self) -> None:
        self._read: list[tuple[int, dict[str, float]]] = []

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Read the `values` (name to 0-D tensor) of `step`, and keep them only when `due`.

        Shapes: each value is 0-D.
        """
        metrics = {name: float(value) for name, value in values.items()}
        if due:
            self._read.append((step, metrics))

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the metrics since the last call. `flush` has no effect, as nothing is pending."""
        read, self._read = self._read, []
        return read


def default_allocator() -> None:
    """Leave the allocator unchanged."""


def sync_every_micro_batch(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Synchronise gradients between processes in every micro-batch.

    Copies of a sharded model add their shards of the gradients once per step, without more memory.
    """
    sharded: Any = model
    if hasattr(sharded, "set_requires_all_reduce"):
        sharded.set_requires_all_reduce(is_last)
    return nullcontext()


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set every gradient to None. The next backward pass allocates new ones."""
    for parameter in parameters:
        parameter.grad = None


def zero_in_place(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradients to zero in place, and allocate missing ones.

    With DDP, gradients stay views of its buckets: it copies a gradient that backward allocated.
    With CUDA graphs, autograd takes the first gradient it finds as the parameter's own, and one
    that a graph wrote would be overwritten by the next micro-batch.
    """
    import torch

    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=parameter.device
                )
            gradients.append(parameter.grad)
    if gradients:
        torch._foreach_zero_(gradients)


@contextmanager
def automatic_gc() -> Iterator[Callable[[int], None]]:
    """Leave Python's garbage collector on. The callback for each step does nothing."""
    yield lambda _step: None


@dataclass(frozen=True)
class Lazy:
    """A part of a recipe by name, `package.module:attribute`, imported at first access."""

    reference: str


def lazy(reference: str) -> Any:
    """Reference a part that needs torch, typed as the part that the attribute returns."""
    return Lazy(reference)


Transform = Callable[[Any, "Mesh | None"], Any]
"""(model, mesh) -> model, changed in place or wrapped. mesh is None when memory is estimated."""
Check = Callable[[Machine, RunConfig], str | None]
"""Returns one sentence on why a speedup cannot or should not run, or None."""
NOISE = {
    "torchao": r"Failed to load \S+/_C\w*\.\S*so: ",
    "torch.utils._pytree": (
        r"<enum 'KernelPreference'> is an Enum subclass and is now natively supported"
    ),
}
"""The start of each hidden line, by logger: torchao's kernels for unused formats and other Python
versions, and a deprecation between torchao and torch.
"""
MODEL_OPS = frozenset({"ops.attention", "ops.heads", "ops.linear", "ops.scan"})
"""Ops that a model may or may not call. Its file states which, as USES."""


@dataclass(frozen=True)
class Recipe:
    """A value for every slot, plain unless a speedup filled it."""

    reader: Callable[[Tokenizer], SequenceReader] = lazy(
        "flatout.data.load.baseline:TokenisingReader"
    )
    """Makes the reader of a sequence's tokens, given the dataset's tokenizer."""
    batching: Callable[[Split | MixedSplit, BatchPlan, SequenceReader | None], StepReader] = lazy(
        "flatout.data.load.batches:SequenceSteps"
    )
    """Makes the reader of steps, which decides the rows of each."""
    loader: Callable[[StepReader], DirectLoader | PrefetchLoader] = lazy(
        "flatout.data.load.loader:DirectLoader"
    )
    """Makes the data loader, which moves rows to the device."""
    micro_batch: Callable[[MicroBatchPlan], int] = rows_people_write
    """Chooses batch.rows_per_device when it is `auto`."""
    matmul: Literal["highest", "high"] = "highest"
    """torch's float32 matmul precision."""
    precision: Precision = FP32
    """Arithmetic of the matmuls."""
    attention: Callable[..., Tensor] = lazy("flatout.ops.attention:reference")
    """Attention inside the blocks."""
    linear: Callable[..., Tensor] = lazy("flatout.ops.linear:reference")
    """Matmuls inside the blocks."""
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = lazy("flatout.ops.heads:reference")
    """Splits a projection into query, key and value heads, normalised and rotated."""
    scan: Callable[..., Tensor] = lazy("flatout.ops.scan:reference")
    """The linear recurrence of an eigenstate network."""
    cross_entropy: Callable[..., tuple[Tensor, Tensor]] = lazy("flatout.ops.cross_entropy:fused")
    """The loss. Its plain value is torch's cross-entropy on whole logits, as people write it."""
    newton_schulz: Callable[[Tensor], Tensor] = lazy("flatout.ops.newton_schulz:reference")
    """Muon's orthogonalisation of a gradient."""
    optimizer: AdamWFactory = lazy("flatout.optim.adamw:per_parameter")
    """Makes AdamW: the whole optimizer, or the part that Muon leaves to AdamW."""
    moments: Callable[[int], int] = lazy("flatout.assembly.memory:two_in_fp32")
    """Returns the bytes of AdamW's moments for a tensor, given its number of weights."""
    low_precision: Transform | None = None
    """Narrows the matmuls of some layers."""
    activations: Transform | None = None
    """Makes blocks keep less for backward. Without it they keep all."""
    compilation: Transform | None = None
    """Compiles the model, or its blocks."""
    cuda_graphs: Transform | None = None
    """Records what is compiled in CUDA graphs."""
    gather_dtype: torch.dtype | None = None
    """Dtype in which fully_shard gathers the blocks' weights. None keeps their own."""
    grad_sync: Callable[[nn.Module, bool], AbstractContextManager[None]] = sync_every_micro_batch
    """(model, whether this is the step's last micro-batch) -> the micro-batch's context, which
    decides whether gradients are synchronised between processes.
    """
    zero_grad: Callable[[Iterable[nn.Parameter]], None] = drop_gradients
    """Clears the parameters' gradients after each step."""
    readback: Callable[[], Readback] = ImmediateReadback
    """Makes the readback of metrics from the device."""
    state_saver: Callable[[], Any] = lazy("flatout.training.checkpoint.savers:Saver")
    """Makes the writer of checkpoints, an `assembly.run.StateSaver`."""
    allocator: Callable[[], None] = default_allocator
    """Called once, before anything is built."""
    gc: Callable[[], AbstractContextManager[Callable[[int], None]]] = automatic_gc
    """Context of the training loop that yields a callback to call after each step."""
    cudnn_benchmark: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the training loop in which cuDNN chooses its algorithms."""
    filled_by: Mapping[str, str] = field(default_factory=dict)
    """Maps each filled slot to its speedup. A slot is filled at most once."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name):
            """Import a `Lazy` part when it is read. `vars()` shows the stored reference."""
            value = super().__getattribute__(name)
            return load_reference(value.reference) if isinstance(value, Lazy) else value

    def with_speedup(self, speedup: Speedup) -> Recipe:
        """Return this recipe with a speedup applied.

        Raises: ConfigError when another speedup already filled one of its slots.
        """
        for slot in speedup.fills:
            if slot in self.filled_by:
                raise both_fill(self.filled_by[slot], speedup.name, slot)
        parts = {slot.removeprefix("ops."): value for slot, value in speedup.fills.items()}
        filled_by = {**self.filled_by, **dict.fromkeys(speedup.fills, speedup.name)}
        return self.with_parts(**parts, filled_by=filled_by)

    def with_parts(self, **parts: Any) -> Recipe:
        """Return this recipe with other values for some slots. Parts are not imported for it."""
        return Recipe(**vars(self) | parts)

    def ops(self) -> Ops:
        """Return the ops that a model is built with."""
        from flatout.ops import Ops

        return Ops(**{each.name: getattr(self, each.name) for each in fields(Ops)})

    def arithmetic(self, device: str) -> str:
        """Return the arithmetic of the matmuls on `device`: fp32, tf32, bf16 or fp16."""
        is_tf32 = self.matmul == "high" and device.startswith("cuda")
        return "tf32" if is_tf32 and self.precision.name == "fp32" else self.precision.name

    def transforms(self) -> list[Transform]:
        """Return the changes to the model in the order in which they must wrap it."""
        found = (getattr(self, slot) for slot in TRANSFORMS)
        return [transform for transform in found if transform is not None]


TRANSFORMS = ("low_precision", "activations", "compilation", "cuda_graphs")
"""The slots that change the model, in order. Sharding, which config.parallel decides, comes last.
"""
OPS = ("attention", "linear", "heads", "scan", "cross_entropy", "newton_schulz")
"""The slots that are called `ops.NAME`: the functions that a model, its loss and Muon use."""
SLOTS = tuple(
    f"ops.{each.name}" if each.name in OPS else each.name
    for each in fields(Recipe)
    if each.name != "filled_by"
)
"""Names of the slots that a speedup may fill."""


def both_fill(first: str, second: str, slot: str, fix: str = "") -> ConfigError:
    """Return the error for two speedups that fill one slot."""
    return ConfigError(
        f"The speedups {first!r} and {second!r} both fill the slot {slot!r}.",
        fix=f"Remove one of the two{fix}.",
    )


@dataclass(frozen=True)
class Tolerance:
    """How far a speedup may change the losses."""

    kind: Literal["exact", "rounding", "statistical"]
    rtol: float = 0.0
    """Largest relative difference between losses on the same batches, for rounding only."""

    @classmethod
    def exact(cls) -> Tolerance:
        """Bit-equal losses on the same batches.

        This holds wherever two runs of one command are bit-equal: on a GPU, with
        train.deterministic=true.
        """
        return cls("exact")

    @classmethod
    def rounding(cls, *, rtol: float) -> Tolerance:
        """Losses on the same batches differ by at most `rtol` in relative terms."""
        return cls("rounding", rtol)

    @classmethod
    def statistical(cls) -> Tolerance:
        """Different batches or arithmetic. The final loss is within the spread over seeds."""
        return cls("statistical")

    def holds(self, fast: Sequence[float], plain: Sequence[float]) -> bool:
        """Return whether two runs' losses, step by step, stay within this tolerance.

        An exact tolerance needs bit-reproducible runs: on a CPU, or with train.deterministic=true.
        A statistical tolerance cannot be checked with two runs: `bench` compares over seeds.
        """
        if len(fast) != len(plain):
            return False
        return all(abs(a - b) <= self.rtol * abs(b) for a, b in zip(fast, plain, strict=True))


@dataclass(frozen=True)
class On:
    """A default of `auto`: on, unless a speedup of a lower rank fills one of its slots."""

    because: str | None = None
    """The reason, in words. None means the speedup's `saves`."""
    from_minutes: float = 0
    """Shortest run for which it is on."""
    beside: str | None = None
    """A speedup without which it gains nothing, and is off."""
    measured: bool = False
    """Whether it is based on a measurement on this kind of device (LOG.md, docs/numbers.md) rather
    than on arithmetic and published measurements.
    """


@dataclass(frozen=True)
class Off:
    """A default of `auto`: off unless named, or measured faster on this hardware."""

    because: str
    """The reason, in words."""
    from_minutes: float = 0
    """Shortest run for which a measured gain turns it on."""
    measured: bool = False
    """See `On`."""
    when_short: bool = False
    """Whether `auto` turns it on when nothing fits the device without it."""


UNRANKED = 10_000
"""Rank of a speedup that states none: last."""


@dataclass(frozen=True)
class Speedup:
    """One speedup, defined in one file of flatout/speedups."""

    name: str
    """The file's name, with hyphens for underscores."""
    saves: str
    """One line on what it saves."""
    tolerance: Tolerance
    """How far it may change the losses."""
    fills: Mapping[str, Any] = field(default_factory=dict)
    """Maps each slot that it fills to its value."""
    needs: tuple[str, ...] = ()
    """Speedups without which it does not work."""
    compiles: bool = False
    """Whether it uses torch.compile.

    Compiled code is called once before training. If that fails, every speedup that compiles is
    turned off.
    """
    why_not: Check = lambda _machine, _config: None
    """Returns one sentence on why it cannot or should not run here, or None. A separate check
    covers models that do not call the functions it replaces.
    """
    predicted: str | None = None
    """The expected gain, up to the first colon or full stop, then the arithmetic behind it. Written
    before anything is measured.
    """

    rank: int = UNRANKED
    """Position among the speedups. Equal ranks go by name.

    Of two defaults for one slot, the first that can run is on. `bench` adds them in this order.
    """
    auto: Mapping[Literal["cpu", "cuda"], On | Off] = field(default_factory=dict)
    """Its default under `speedups=auto` on each device. Off if not stated."""

    def __post_init__(self) -> None:
        for slot in self.fills:
            if slot not in SLOTS:
                raise ConfigError(
                    f"The speedup {self.name!r} fills {slot!r}, which is not a slot.",
                    fix=f"Use one of: {', '.join(SLOTS)}.",
                )

    def reason_against(self, machine: Machine, config: RunConfig) -> str | None:
        """Return why it cannot or should not run here, or None.

        The reason is an unknown speedup among its needs, a model that calls none of the functions
        it replaces, or the answer of `why_not`.
        """
        known = SPEEDUPS.names()
        for need in self.needs:
            if ":" not in need and need not in known:
                return f"It needs {need}, which is not among the speedups."
        used = MODELS.stated(config.model.kind, "USES")
        if used == () and (MODEL_OPS | {"ops.cross_entropy"}) & self.fills.keys():
            return f"The model {config.model.kind!r} calls none of the functions that it replaces."
        if (
            used is not None
            and self.fills
            and self.fills.keys() <= MODEL_OPS
            and not {f"ops.{name}" for name in used} & self.fills.keys()
        ):
            return f"The model {config.model.kind!r} makes no use of {' and '.join(self.fills)}."
        return self.why_not(machine, config)


def uses_gpu(machine: Machine, config: RunConfig) -> bool:
    """Return whether the run uses an NVIDIA GPU, given its configuration and machine."""
    return (
        bool(machine.gpus)
        if config.train.device == "auto"
        else config.train.device.startswith("cuda")
    )


def gpu_below(machine: Machine, capability: tuple[int, int], what: str) -> str | None:
    """Return why a GPU of this machine is too old for `what`, or None."""
    too_old = [gpu for gpu in machine.gpus if gpu.compute_capability < capability]
    if not too_old:
        return None
    have = ".".join(str(part) for part in too_old[0].compute_capability)
    return (
        f"{what} needs compute capability {capability[0]}.{capability[1]}. "
        f"The {too_old[0].name} has {have}."
    )


def first_of(*checks: Check) -> Check:
    """Return the check that gives the first reason of these, or None."""

    def check(machine: Machine, config: RunConfig) -> str | None:
        return next((why for one in checks if (why := one(machine, config))), None)

    return check


def needs_gpu(
    what: str, capability: tuple[int, int] | None = None, instead: str | None = None
) -> Check:
    """Return the check that the run uses an NVIDIA GPU, of at least a compute capability."""
    advice = f" Use {instead} instead." if instead else ""

    def check(machine: Machine, config: RunConfig) -> str | None:
        if uses_gpu(machine, config):
            too_old = capability and gpu_below(machine, capability, what)
            return too_old and too_old + advice
        least = capability and " of compute capability {}.{} or higher".format(*capability)
        return f"{what} needs an NVIDIA GPU{least or ''}, but this run uses a CPU.{advice}"

    return check


def needs_cpu(machine: Machine, config: RunConfig) -> str | None:
    """Return that the run does not use a CPU, or None."""
    return (
        "It only applies to CPUs, but this run uses a GPU." if uses_gpu(machine, config) else None
    )


def needs_package(package: str, extra: str | None = None) -> Check:
    """Return the check that an optional package, of one of flatout's extras, is installed.

    A machine that is only planned for may have it.
    """
    install = package if extra is None else f'"flatout[{extra}]"'
    missing = f"It needs the package {package}, which is not installed: pip install {install}."
    name = package.replace("-", "_")
    return lambda machine, _config: missing if machine.is_here and not find_spec(name) else None


def without_compiler(machine: Machine, config: RunConfig) -> str | None:
    """Return why torch.compile cannot work here, or None: a CPU needs a C++ compiler."""
    if not uses_gpu(machine, config) and not (shutil.which("g++") or shutil.which("clang++")):
        return "On a CPU torch.compile needs a C++ compiler: apt install g++."
    return None


def load_package(module: str, speedup: str, extra: str) -> ModuleType:
    """Import and return a module of an optional package, without its startup messages.

    Raises: MissingPackage with the command to install it.
    """
    try:
        with without_noise():
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackage(
            f"The speedup {speedup!r} needs the package {package}, which is not installed.",
            fix=f'Install it: `pip install "flatout[{extra}]"`.',
        ) from error


@contextmanager
def without_noise() -> Iterator[None]:
    """Return a context that hides the log lines in `NOISE` and shows all others."""

    def shows(record: logging.LogRecord) -> bool:
        return re.match(NOISE[record.name], record.getMessage()) is None

    loggers = [logging.getLogger(name) for name in NOISE]
    for logger in loggers:
        logger.addFilter(shows)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(shows)


def compile_blocks(model: LanguageModel, _mesh: Mesh | None) -> LanguageModel:
    """Compile each layer in place, and the loss, which includes the output projection.

    Embedding and final norm are not compiled. The loss takes its weight as an argument, so that no
    graph guards a parameter that fully_shard gathers and frees.
    """
    import torch

    for layer in model.layers:
        layer.compile(dynamic=False)
    cross_entropy = torch.compile(model.ops.cross_entropy, dynamic=False)
    model.ops = replace(model.ops, cross_entropy=cross_entropy)
    return model
