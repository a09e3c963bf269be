"""Predict the memory, the rate and the duration of a run from what was measured on this hardware.

One file per GPU or CPU in flatout's cache has the gains that `bench` measured, which `auto` prefers
to the defaults in the speedups' own files and `list speedups` shows, and the rates of finished
runs. A value that neither they nor a data sheet support is None, and every number has a source.
Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.assembly.selection import Decision, Gain, recipe_of, speedup_named
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset, members_of
from flatout.hardware.machine import ASSUMED_MFU, Machine
from flatout.progress import counted
from flatout.storage.files import Stored, write_text

if TYPE_CHECKING:
    from flatout.assembly.gpu_rate import GpuTime
    from flatout.hardware.roofline import Peak

GIB = 2**30
FORMAT_VERSION = 1
MINUTES = 30
"""Suggested --minutes on a GPU: about 40 trials, assumed to take 20 s each with start and
compilation, and two rounds.
"""
MOST_RUNS = 200
"""Runs kept per file. Older ones are dropped."""
LAST_RUNS = 5
"""How many of the latest runs of one kind are used."""
SIMILAR = 4
"""Ratio of FLOPs per token below which the rate, or a gain, of one model is taken for another's."""
EAGER_MFU, COMPILED_MFU = 0.22, 0.42
"""Measured on an H100 with 124 M parameters: 0.224 eager, 0.410 compiled, and 0.463 for the
eigenstate network on sequences of 32,768 tokens (docs/numbers/gpu.md)."""
STARTING_S = 15e-6
"""Assumed seconds to start an operation in eager mode, from Python to its backward pass."""
EVALUATION_COST = 3
"""A training token costs as much as this many evaluated ones: forward, and backward twice that."""
EAGER_ERROR = 0.1
"""Error of the estimate for an eager model, as benchmarks/plan.py measures it."""
LEAST_COMPILED = 0.3
"""Least share of the eager estimate's activations and workspace that a compiled model may need."""
CUDA_CONTEXT = GIB // 2
"""Assumed memory of the CUDA context and the libraries' workspaces, which depends on the GPU."""
CUDA_RESERVED = 1.1
"""Assumed ratio of what torch's allocator reserves to what is allocated."""
CPU_OVERHEAD = GIB // 10
"""Assumed memory of a process on a CPU besides tensors and what it holds before it starts."""
HEAP_HOLES = 2
"""How many times the largest tensor the heap holds unused if it keeps freed memory: 0 to 5 in 15
runs of two shapes (a vocabulary of 32,768, with 64 and 16 rows).
"""


@dataclass(frozen=True)
class Moment:
    """What exists at one moment of a step, besides the weights and the optimizer state."""

    name: str
    gradients: int
    activations: int
    """Tensors kept for backward, with the tokens."""
    transient: int
    """Everything else: what the pass that is running needs for itself."""

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.gradients + self.activations + self.transient


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device in a training step, as traced by `flatout.assembly.memory`."""

    weights: int
    """Parameters and buffers of this process."""
    gradients: int
    """One gradient per trained parameter of this process."""
    optimizer: int
    """Optimizer state."""
    activations: int
    """Tensors that embedding and blocks keep for backward, with low-precision copies of weights."""
    logits: int
    """Peak of final norm, head and loss, including the logits' gradient."""
    workspace: int
    """Excess of one block's backward over `logits`, and gathered weights if sharded."""
    peak: Moment
    """The moment of the step at which most memory exists. Parts do not all exist at once."""
    largest: int
    """The largest tensor that a micro-batch creates."""
    operations: int
    """Operations that an eager step starts, without views. The optimizer's are assumed."""
    host: int = 0
    """Weights, gradients and optimizer state of this process in host memory."""

    @property
    def fixed(self) -> int:
        """Bytes of weights and optimizer state, which exist throughout."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.fixed + self.peak.total


class PastRun(Stored, extra="ignore"):
    """One finished run: what it was, and what was measured."""

    by: Literal["train", "bench"]
    """The command that measured it."""
    digest: str
    """Digest of all that decides its arithmetic but the micro-batch."""
    kind: str
    """The model's kind."""
    speedups: list[str]
    """Speedups that were on, in order of their names."""
    rows_per_device: int
    """Sequences in a micro-batch."""
    accumulate: int
    """Micro-batches per step."""
    world_size: int
    """Processes."""
    is_compiled: bool
    """Whether anything was compiled."""
    is_busy: bool = False
    """Whether other processes used the cores meanwhile, on a CPU only."""
    tokens_per_s: float = 0.0
    """Measured steady rate. 0 if not measured."""
    flops_per_token: float = 0.0
    """FLOPs of a token. 0 if not known."""
    beside_s: float | None = None
    """Seconds besides its steps and evaluations at the steady rate: start, compiling, saves."""
    cached_s: float = 0.0
    """The part of it in which torch compiled what it then kept on disk."""


class MeasuredHere(Stored):
    """The file of one GPU or CPU."""

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    hardware: str
    """The GPU as its driver names it, or the CPU and its cores."""
    speedups: dict[str, Gain] | None = None
    """Gains by name and FLOPs per token, `compile@2.4e+06`. Null means nothing has been measured,
    and the user has not been told so."""
    runs: tuple[PastRun, ...] = ()
    """Finished runs, oldest first."""


def hardware_name(machine: Machine, device: str) -> str | None:
    """Return the GPU of a run on `device`, or the CPU with its cores. None for an absent GPU."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return next((gpu.name for gpu in machine.gpus[int(index or 0) :]), None)
    return f"{machine.cpu_name}, {machine.cores} cores" + (", MPS" if device == "mps" else "")


def read(hardware: str | None, cache: Path | None) -> MeasuredHere:
    """Return what was measured on this hardware: nothing without a file that this version reads."""
    nothing = MeasuredHere(hardware=hardware or "")
    if hardware is None or cache is None:
        return nothing
    try:
        found = MeasuredHere.model_validate_json(_path(hardware, cache).read_text("utf-8"))
    except (OSError, ValueError):
        return nothing
    is_own = found.hardware == hardware and found.format_version == FORMAT_VERSION
    return found if is_own else nothing


def keep(
    hardware: str, cache: Path, gains: Mapping[str, Gain] | None = None, run: PastRun | None = None
) -> Path:
    """Add gains or a run to the file of this hardware. Return its path.

    A gain replaces the earlier ones of its speedup with similar models.

    Raises: OSError when the cache cannot be written.
    """
    path, found = _path(hardware, cache), read(hardware, cache)
    if gains is not None:
        kept = {
            key: gain
            for key, gain in (found.speedups or {}).items()
            if (new := gains.get(key.partition("@")[0])) is None
            or not _similar(gain.flops_per_token, new.flops_per_token)
        }
        kept |= {f"{name}@{gain.flops_per_token:.3g}": gain for name, gain in gains.items()}
        found = found.model_copy(update={"speedups": kept})
    if run is not None:
        found = found.model_copy(update={"runs": (*found.runs, run)[-MOST_RUNS:]})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, found.model_dump_json(indent=1) + "\n")
    return path


def _path(hardware: str, cache: Path) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return cache.expanduser() / "measured" / f"{name}.json"


def gains_here(
    machine: Machine,
    device: str,
    cache: Path | None,
    flops_per_token: Callable[[], float] | None = None,
) -> dict[str, Gain]:
    """Return the gains measured on the hardware of `device` with the torch in use, by speedup.

    They are those of models with similar FLOPs per token, of several the nearest. Without
    `flops_per_token`, the last of any model. Without a `cache` there are none.
    """
    here = version("torch").partition("+")[0]  # 2.13.0+cu130 and 2.13.0+cpu are the same release
    stored = read(hardware_name(machine, device), cache).speedups or {}
    gains = [
        (key.partition("@")[0], gain)
        for key, gain in stored.items()
        if gain.torch.partition("+")[0] == here
    ]
    if gains and flops_per_token is not None:
        flops = flops_per_token()
        near = [(name, gain) for name, gain in gains if _similar(gain.flops_per_token, flops)]
        gains = sorted(near, key=lambda each: -abs(math.log(each[1].flops_per_token / flops)))
    return dict(gains)


def _similar(flops_per_token: float, other: float) -> bool:
    """Return whether two numbers of FLOPs per token are known, and within SIMILAR times."""
    return 0 < flops_per_token < SIMILAR * other and other < SIMILAR * flops_per_token


def runs_here(machine: Machine, device: str, cache: Path | None) -> Sequence[PastRun]:
    """Return the runs recorded on the hardware of `device`, oldest first."""
    return read(hardware_name(machine, device), cache).runs


def advice(gpu: str, recipe: str, cache: Path) -> str | None:
    """Return the hint for the first run on a GPU without measurements. None from the second on."""
    if read(gpu, cache).speedups is not None:
        return None
    with suppress(OSError):  # the hint is then repeated at the next run
        keep(gpu, cache, {})
    return (
        f"No speedup has been measured on this GPU ({gpu}). `flatout bench {recipe} --minutes "
        f"{MINUTES}`, with this run's settings, measures them in about {MINUTES} minutes."
    )


def speedups_on(decisions: Iterable[Decision]) -> list[str]:
    """Return the speedups that are on, apart from one that only chose the micro-batch."""
    on = [decision.name for decision in decisions if decision.on]
    return [name for name in on if "micro_batch" not in speedup_named(name).fills]


def past_run(
    config: RunConfig,
    decisions: Iterable[Decision],
    world_size: int = 1,
    *,
    by: Literal["train", "bench"] = "train",
    **measured: Any,
) -> PastRun:
    """Return the record of a resolved run with what was measured."""
    speedups = sorted(speedups_on(decisions))
    parts = [
        config.model.model_dump(mode="json"),
        config.data.seq_len,
        config.optim.kind,
        config.data.document_mask,
        config.train.precision,
        speedups,
        world_size,
        config.lora.model_dump(mode="json"),
    ]
    return PastRun(
        by=by,
        digest=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16],
        kind=config.model.kind,
        speedups=speedups,
        rows_per_device=int(config.batch.rows_per_device),
        accumulate=config.batch.accumulate or 1,
        world_size=world_size,
        is_compiled=any("compilation" in speedup_named(name).fills for name in speedups),
        **measured,
    )


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted peak memory of one rank, in bytes."""

    estimate: MemoryEstimate
    """The parts, in eager mode."""
    reserved: int
    """What the allocator holds for the tensors."""
    context: int
    """What the process needs besides: the CUDA context, or on a CPU Python, torch and buffers."""
    least: int
    """The least that the tensors may need, considering the error."""
    error: float | None
    """Relative error to expect of the total. None if it is unknown."""
    source: str
    """Where the numbers come from."""
    on_gpu: bool

    @property
    def total(self) -> int:
        """Everything that the device must hold."""
        return self.reserved + self.context

    @property
    def peak_gib(self) -> float:
        """The number that `train` reports: allocated on a GPU, the whole process on a CPU."""
        return (self.estimate.total if self.on_gpu else self.total) / GIB


@dataclass(frozen=True)
class TimePrediction:
    """Predicted rate and duration of a run."""

    tokens_per_s: float | None
    """Steady rate of all ranks together."""
    wall_s: float | None
    """Seconds of the whole run."""
    mfu: float | None
    """Share of the peak rate that the rate assumes. None if the peak is unknown."""
    source: str
    """Where the rate comes from."""
    error: float | None
    """Relative error to expect of the time. None if it is unknown."""


def predict_memory(
    this: PastRun, estimate: MemoryEstimate, *, on_gpu: bool = False, context: int = 0
) -> MemoryPrediction:
    """Return the peak memory of one rank of `this`, a run without measurements.

    `context` is the memory of this process so far (CPU).
    """
    holes = 0 if on_gpu else _heap_holes(estimate, this.speedups)
    source, least = "traced in eager mode", estimate.total
    error: float | None = max(EAGER_ERROR, holes / (estimate.total + holes))
    if this.is_compiled:
        source += ", but a compiled model usually needs less, by an unknown amount"
        least, error = estimate.fixed + int(LEAST_COMPILED * estimate.peak.total), None
    return MemoryPrediction(
        estimate,
        int(CUDA_RESERVED * estimate.total) if on_gpu else estimate.total + holes,
        CUDA_CONTEXT if on_gpu else context + CPU_OVERHEAD,
        int(least * (1 - EAGER_ERROR)),
        error,
        source,
        on_gpu,
    )


def _heap_holes(estimate: MemoryEstimate, speedups: Sequence[str]) -> int:
    """Return the bytes of freed tensors that glibc's heap keeps and cannot reuse, on a CPU.

    Small blocks that are allocated inside a freed tensor leave a hole that is too small for the
    next tensor of its size.
    """
    keeps = any("allocator" in speedup_named(name).fills for name in speedups)
    return HEAP_HOLES * estimate.largest if keeps else 0


def predict_time(
    this: PastRun,
    config: RunConfig,
    *,
    flops_per_token: float,
    peak: Peak | None,
    runs: Sequence[PastRun] = (),
    machine: Machine | None = None,
    dataset: AnyDataset | None = None,
    first_step: int = 0,
    memory: MemoryPrediction | None = None,
) -> TimePrediction:
    """Return the rate and the duration of `this`, a run of `config` without measurements.

    A run of the same shape with the same speedups decides. Otherwise rates from bench for it, the
    rate of FLOPs that models of similar size reached here, what published runs took on the GPUs of
    a `machine` (`gpu_time`), or an assumed share of the peak. A run whose micro-batch also is the
    same is preferred, and one that had the cores to itself. With the `memory` of an eager run, the
    assumption counts what it takes to start its operations.
    """
    tokens, world_size = config.batch.tokens_per_step or 0, this.world_size
    timed = [run for run in runs if run.tokens_per_s]

    def preference(run: PastRun) -> tuple[bool, bool, bool]:
        return run.by == "train", run.rows_per_device == this.rows_per_device, not run.is_busy

    same = [run for run in timed if run.digest == this.digest]
    best = max(map(preference, same), default=(False, False, False))
    same = [run for run in same if preference(run) == best][-LAST_RUNS:]
    whole = peak and peak.tflops * 1e12 * world_size / flops_per_token
    others = [
        run.tokens_per_s * run.flops_per_token / run.world_size
        for run in timed
        if (run.kind, run.speedups) == (this.kind, this.speedups)
        and _similar(run.flops_per_token, flops_per_token)
    ][-LAST_RUNS:]
    rate, source = None, "unknown: no peak rate is known for this device"
    if same:
        # Whatever disturbs a run makes it slower, so of two the faster one counts.
        rate = statistics.median_high(run.tokens_per_s for run in same)
        earlier = f"{counted(len(same), 'earlier run')} of"
        source = earlier if best[0] else f"{counted(len(same), 'measurement')} of bench for"
        source += " this shape here"
        source += "" if best[2] else ", while other processes used the cores"
    elif others:
        rate = statistics.median(others) * world_size / flops_per_token
        source = f"the FLOP/s of {counted(len(others), 'earlier run')} of other shapes here"
    elif whole:
        operations = memory.estimate.operations if memory and not this.is_compiled else 0
        rate, source = assumed_rate(config, whole, operations, published(this, config, machine))
    mfu, steps = rate / whole if rate and whole else None, config.train.steps
    if mfu is not None and mfu > 1:  # other processes used the cores while the peak was measured
        mfu = None
    if rate is None or steps is None:
        return TimePrediction(rate, None, mfu, source, None)
    score_s = tokens_to_score(config, dataset, first_step) / (EVALUATION_COST * rate)
    beside = [  # another run with as many rows finds in torch's cache what this one compiled
        run.beside_s - (run.cached_s if run.rows_per_device == this.rows_per_device else 0.0)
        for run in same
        if run.beside_s is not None
    ]
    wall_s = (steps - first_step) * tokens / rate + score_s
    wall_s += max(statistics.median_low(beside or [0.0]), 0.0)
    misses = [abs(rate / run.tokens_per_s - 1) for run in same]
    return TimePrediction(rate, wall_s, mfu, source, max(misses) if len(misses) > 1 else None)


def published(this: PastRun, config: RunConfig, machine: Machine | None) -> GpuTime | None:
    """Return the time of a step by what published runs took. None without a known GPU."""
    row = machine.row if machine and config.train.device.startswith("cuda") else None
    if machine is None or row is None:
        return None
    from flatout.assembly.gpu_rate import gpu_time

    peak = row.peak_tflops.get(recipe_of(config).arithmetic("cuda"))
    if peak is None:
        return None
    kinds = [*this.speedups, *(["compile"] if this.is_compiled else [])]
    flops = peak.value * 1e12
    return gpu_time(
        config, machine, row, peak_flops=flops, world_size=this.world_size, speedups=kinds
    )


def assumed_rate(
    config: RunConfig, whole: float, operations: int, known: GpuTime | None = None
) -> tuple[float, str]:
    """Return the tokens per second of all devices, and what was assumed.

    `whole` is the token rate at the peak matmul rate. With the `operations` of an eager step,
    small ones count: a CPU computes after it has started an operation, a GPU meanwhile. GPUs that
    are not `known` are assumed to reach what an H100 was measured to (docs/numbers/gpu.md).
    """
    on_gpu = config.train.device.startswith("cuda")
    share = (EAGER_MFU if operations else COMPILED_MFU) if on_gpu else ASSUMED_MFU
    computing = f"an assumed {share:.0%} of the peak"
    tokens = config.batch.tokens_per_step or 0
    if known is not None:
        share, computing = tokens / known.step_s / whole, known.describe()
    computing_s, starting_s = tokens / (share * whole), operations * STARTING_S
    starting = f"an assumed {1e6 * STARTING_S:.0f} us to start each of {operations:,} operations"
    if operations and not on_gpu:
        return tokens / (computing_s + starting_s), f"{computing}, and {starting} per step"
    if starting_s > computing_s:
        return tokens / starting_s, f"{starting} per step"
    return share * whole, computing


def tokens_to_score(config: RunConfig, dataset: AnyDataset | None, first_step: int = 0) -> int:
    """Return the validation tokens that a run scores from `first_step` on. 0 without a dataset.

    The last evaluation is on the whole split. If those during the run are on a part of it, that
    part is scored at the end, too.
    """
    train, members = config.train, members_of(dataset) if dataset else ()
    whole = sum(member.dataset.split("val").num_tokens for member in members)
    if not train.eval_every:
        return whole
    last = (train.steps or 0) - 1
    scored = 1 + max(last // train.eval_every - first_step // train.eval_every, 0)
    if train.eval_tokens is None or train.eval_tokens == "all":
        return whole * scored
    return min(train.eval_tokens, whole) * scored + whole
