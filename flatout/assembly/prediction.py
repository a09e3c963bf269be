"""Predict the peak memory, the rate and the duration of a resolved run.

Earlier runs on the same hardware (`flatout.assembly.past_runs`) correct the arithmetic. A figure
that neither they nor a data sheet support is None, and every figure says where it comes from.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.assembly.assumed_rate import assumed_rate
from flatout.assembly.memory import GIB, MemoryEstimate, Workload
from flatout.assembly.parts import Decision
from flatout.assembly.past_runs import PastRun, alike, shape_of
from flatout.assembly.selection import assemble, speedup_named
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset, members_of
from flatout.json_io import JsonObject
from flatout.registry import SPEEDUPS
from flatout.roof import Peak

EAGER_ERROR = 0.1
"""Error of the estimate for an eager model; benchmarks/plan.py measures it."""
LEAST_ERROR = 0.02
"""Least error that is stated, however well earlier runs agree."""
LEAST_COMPILED = 0.3
"""Least share of the eager estimate's activations and workspace that a compiled model may need."""
CUDA_CONTEXT = GIB // 2
"""Assumed memory of the CUDA context and the libraries' workspaces, which depends on the GPU."""
CUDA_RESERVED = 1.1
"""Assumed ratio of what torch's allocator reserves to what is allocated."""
CPU_OVERHEAD = GIB // 10
"""Assumed memory of a process on a CPU besides tensors and what it holds before it starts."""
LAST_RUNS = 5
"""How many of the latest runs of one kind are used."""
SIMILAR = 4
"""Largest ratio of FLOPs per token at which a model's share of the peak is taken for another's."""
HEAP_HOLES = 2
"""How many times the largest tensor the heap holds in vain if it keeps freed memory: 0 to 5 in 15
runs of two shapes (a vocabulary of 32,768; 64 and 16 rows).
"""
EVALUATION_COST = 3
"""A training token costs as much as this many evaluated ones: forward, and backward twice that."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted peak memory of one rank, in bytes."""

    estimate: MemoryEstimate
    """The parts, in eager mode."""
    allocated: int
    """Tensors at the peak; what `train` reports on a GPU."""
    reserved: int
    """What the allocator holds for them."""
    context: int
    """What the process needs besides: the CUDA context, or on a CPU Python, torch and buffers."""
    least: int
    """The least that the tensors may need, considering the error."""
    error: float | None
    """Relative error to expect of the total; None if it is unknown."""
    source: str
    """Where the figures come from."""
    on_gpu: bool

    @property
    def total(self) -> int:
        """Everything that the device must hold."""
        return self.reserved + self.context

    @property
    def peak_gib(self) -> float:
        """The figure that `train` reports: allocated on a GPU, the whole process on a CPU."""
        return (self.allocated if self.on_gpu else self.total) / GIB


@dataclass(frozen=True)
class TimePrediction:
    """Predicted rate and duration of a run."""

    tokens_per_s: float | None
    """Steady rate of all ranks together."""
    wall_s: float | None
    """Seconds of the whole run."""
    mfu: float | None
    """Share of the peak rate that the rate assumes; None if the peak is unknown."""
    source: str
    """Where the rate comes from."""
    error: float | None
    """Relative error to expect of the time; None if it is unknown."""


@dataclass(frozen=True)
class Prediction:
    """What `train` predicts before its first step."""

    memory: MemoryPrediction | None
    """None when the model cannot run on tensors without values."""
    time: TimePrediction

    def to_dict(self) -> JsonObject:
        """Return the figures under the names of the summary's measured ones, with their sources."""
        return {
            "tokens_per_s": self.time.tokens_per_s,
            "tokens_per_s_from": self.time.source,
            "wall_s": self.time.wall_s,
            "peak_gib": self.memory.peak_gib if self.memory else None,
            "peak_gib_from": self.memory.source if self.memory else "not predictable",
        }


def speedups_on(decisions: Iterable[Decision]) -> list[str]:
    """Return the speedups that are on, apart from one that only chose the micro-batch."""
    return [
        decision.name
        for decision in decisions
        if decision.on and "micro_batch" not in speedup_named(decision.name).fills
    ]


def compiles(decisions: Iterable[Decision]) -> bool:
    """Return whether anything of a run is compiled."""
    return "compilation" in assemble(decisions).filled_by


def past_run(config: RunConfig, decisions: Sequence[Decision], **measured: Any) -> PastRun:
    """Return the record of a run with what was measured."""
    return PastRun(
        shape=shape_of(config),
        kind=config.model.kind,
        speedups=speedups_on(decisions),
        rows_per_device=int(config.batch.rows_per_device),
        accumulate=config.batch.accumulate or 1,
        is_compiled=compiles(decisions),
        **measured,
    )


def predict_memory(
    config: RunConfig,
    decisions: Sequence[Decision],
    estimate: MemoryEstimate,
    *,
    runs: Sequence[PastRun] = (),
    world_size: int = 1,
    context: int = 0,
) -> MemoryPrediction:
    """Return the peak memory of one rank.

    `runs` are those recorded on this hardware, `context` the memory of this process so far (CPU).
    """
    on_gpu = config.train.device.startswith("cuda")
    is_compiled = compiles(decisions)
    measured = [run for run in runs if run.by == "train" and run.estimate and run.peak_gib]
    same = [
        run
        for run in alike(measured, shape_of(config), speedups_on(decisions), world_size)
        if run.rows_per_device == config.batch.rows_per_device
    ][-LAST_RUNS:]
    kind = [
        run for run in measured if run.kind == config.model.kind and run.is_compiled == is_compiled
    ][-LAST_RUNS:]
    used = same or kind
    fixed = fixed_bytes(estimate, is_compiled=is_compiled and bool(used))
    variable = estimate.peak.total
    allocated = reserved = estimate.total
    error: float | None = None if is_compiled and not used else EAGER_ERROR
    if on_gpu:
        share = statistics.median(map(_share, used)) if used else 1.0
        allocated = int(fixed + share * variable)
        reserved = int(allocated * _reserved(used))
        extra = CUDA_CONTEXT
    else:
        holes = int(_heap_holes(estimate, speedups_on(decisions)))
        reserved += holes
        error = error and max(error, holes / reserved)
        beside = int(statistics.median(map(_overhead, used))) if used else CPU_OVERHEAD
        extra = max(context + beside, 0)
    least = min(allocated, estimate.total)
    if is_compiled and not (on_gpu and same):
        least = estimate.fixed + int(LEAST_COMPILED * variable)
    if used:
        error = max(LEAST_ERROR if same else EAGER_ERROR, _spread(used, on_gpu=on_gpu))
    return MemoryPrediction(
        estimate,
        allocated,
        reserved,
        extra,
        int(least * (1 - EAGER_ERROR)),
        error,
        _memory_source(same, kind, is_compiled),
        on_gpu,
    )


def fixed_bytes(estimate: MemoryEstimate, *, is_compiled: bool) -> int:
    """Return the bytes at the peak that do not depend on the micro-batch.

    A compiled model holds all gradients at its peak; an eager one need not.
    """
    return estimate.fixed + (estimate.gradients if is_compiled else 0)


def _share(run: PastRun) -> float:
    """Return the measured share of what depends on the micro-batch."""
    if run.estimate is None:
        return 1.0
    measured = _peak(run) - fixed_bytes(run.estimate, is_compiled=run.is_compiled)
    return max(measured, 0.0) / max(run.estimate.peak.total, 1)


def _reserved(runs: Sequence[PastRun]) -> float:
    """Return the ratio of what the allocator reserves on a GPU to what is allocated."""
    found = [run.reserved_gib / run.peak_gib for run in runs if run.reserved_gib and run.peak_gib]
    return statistics.median(found) if found else CUDA_RESERVED


def _overhead(run: PastRun) -> float:
    """Return the measured bytes of a process on a CPU besides its tensors and its start."""
    held = run.estimate.total + _heap_holes(run.estimate, run.speedups) if run.estimate else 0
    return _peak(run) - GIB * (run.context_gib or 0.0) - held


def _heap_holes(estimate: MemoryEstimate, speedups: Sequence[str]) -> float:
    """Return the bytes of freed tensors that glibc's heap keeps and cannot reuse, on a CPU.

    Small blocks that are allocated inside a freed tensor leave a hole that is too small for the
    next tensor of its size.
    """
    known = set(speedups) & set(SPEEDUPS.names())  # an earlier run may have had others
    keeps = any("allocator" in SPEEDUPS.get(name).fills for name in known)
    return HEAP_HOLES * estimate.largest if keeps else 0.0


def _peak(run: PastRun) -> float:
    return GIB * (run.peak_gib or 0.0)


def _spread(runs: Sequence[PastRun], *, on_gpu: bool) -> float:
    """Return how far from the peak of each run their median correction is, at most."""
    if len(runs) == 1:
        return EAGER_ERROR
    correction = _share if on_gpu else _overhead
    median = statistics.median(map(correction, runs))

    def miss(run: PastRun) -> float:
        unit = run.estimate.peak.total if on_gpu and run.estimate else 1
        return abs(correction(run) - median) * unit / (_peak(run) or 1.0)

    return max(map(miss, runs))


def _memory_source(same: Sequence[PastRun], kind: Sequence[PastRun], is_compiled: bool) -> str:
    if same:
        return f"traced, corrected by {_count(same)} of this recipe's shape here"
    if kind:
        return f"traced, corrected by {_count(kind)} of other shapes here"
    if is_compiled:
        return "traced in eager mode; a compiled model usually needs less, by an unknown amount"
    return "traced in eager mode"


def _count(runs: Sequence[PastRun]) -> str:
    return f"{len(runs)} earlier run{'s' if len(runs) > 1 else ''}"


def predict_time(
    config: RunConfig,
    decisions: Sequence[Decision],
    *,
    flops_per_token: float,
    peak: Peak | None,
    runs: Sequence[PastRun] = (),
    world_size: int = 1,
    dataset: AnyDataset | None = None,
    first_step: int = 0,
    workload: Workload | None = None,
) -> TimePrediction:
    """Return the rate and the duration of a resolved run on `world_size` devices.

    A run of the same shape with the same speedups decides; otherwise figures of bench for it, the
    share of the peak that models of similar size reached here, or an assumed share. A run whose
    micro-batch also is the same is preferred, and one that had the cores to itself. With a
    `workload`, the assumption counts what it takes to start the operations of an eager step.
    """
    speedups = speedups_on(decisions)
    rate, source, past = _known_rate(config, speedups, flops_per_token, peak, runs, world_size)
    if rate is None and peak is not None:
        whole = peak.tflops * 1e12 * world_size / flops_per_token
        rate, source = assumed_rate(config, whole, None if compiles(decisions) else workload)
    mfu = rate * flops_per_token / (peak.tflops * 1e12 * world_size) if rate and peak else None
    steps = config.train.steps
    if rate is None or steps is None:
        return TimePrediction(rate, None, mfu, source, None)
    train_s = (steps - first_step) * (config.batch.tokens_per_step or 0) / rate
    scored = tokens_to_score(config, dataset, first_step)
    score_s = (scored or 0) / (EVALUATION_COST * rate)
    rows = config.batch.rows_per_device
    beside = [_beside(run, rows) for run in past if run.wall_s and run.train_s] or [0.0]
    wall_s = train_s + score_s + statistics.median_low(beside)
    misses = [abs(rate / run.tokens_per_s - 1) for run in past if run.tokens_per_s]
    error = max(misses) if len(misses) > 1 else None
    return TimePrediction(rate, wall_s, mfu, source, error)


def _known_rate(
    config: RunConfig,
    speedups: Sequence[str],
    flops_per_token: float,
    peak: Peak | None,
    runs: Sequence[PastRun],
    world_size: int,
) -> tuple[float | None, str, Sequence[PastRun]]:
    """Return the rate that runs have reached, its source, and the runs; without any, no rate."""
    timed = [run for run in runs if run.tokens_per_s]
    same = alike(timed, shape_of(config), speedups, world_size)
    for by, what in (("train", "of this shape here"), ("bench", "of bench for this shape here")):
        found = [run for run in same if run.by == by]
        rows = [run for run in found if run.rows_per_device == config.batch.rows_per_device]
        alone = [run for run in rows or found if not run.is_busy]
        used = (alone or rows or found)[-LAST_RUNS:]
        if used:
            # Whatever disturbs a run makes it slower, so of two the faster one counts.
            rate = statistics.median_high(run.tokens_per_s or 0.0 for run in used)
            counted = _count(used) if by == "train" else f"{len(used)} measurement(s)"
            load = "" if alone else ", while other processes used the cores"
            return rate, f"{counted} {what}{load}", used
    if peak is None:
        return None, "unknown: no peak rate is known for this device", ()
    whole = peak.tflops * 1e12 * world_size / flops_per_token
    others = [
        run
        for run in timed
        if run.kind == config.model.kind
        and set(run.speedups) == set(speedups)
        and _is_similar(run, flops_per_token, peak)
    ][-LAST_RUNS:]
    if others:
        mfu = statistics.median(run.mfu or 0.0 for run in others)
        return mfu * whole, f"{mfu:.0%} of the peak, as {_count(others)} of other shapes here", ()
    return None, "unknown", ()


def _is_similar(run: PastRun, flops_per_token: float, peak: Peak) -> bool:
    """Return whether a run's model is of similar size; a tiny one is far from the peak."""
    if not run.mfu or not run.tokens_per_s:
        return False
    flops = run.mfu * peak.tflops * 1e12 * run.world_size / run.tokens_per_s
    return 1 / SIMILAR < flops / flops_per_token < SIMILAR


def _beside(run: PastRun, rows: int | str) -> float:
    """Return the seconds of a run besides its steps and evaluations: start, compiling, saves.

    Another run with as many `rows` finds in torch's cache what this one compiled.
    """
    cached_s = run.cached_s if run.rows_per_device == rows else 0.0
    taken_s = (run.train_s or 0.0) + (run.score_s or 0.0) + cached_s
    return max((run.wall_s or 0.0) - taken_s, 0.0)


def tokens_to_score(
    config: RunConfig, dataset: AnyDataset | None, first_step: int = 0
) -> int | None:
    """Return the validation tokens that a run scores from `first_step` on; None without a dataset.

    The last evaluation is on the whole split. If those during the run are on a part of it, that
    part is scored at the end, too.
    """
    if dataset is None:
        return None
    train = config.train
    whole = sum(member.dataset.split("val").num_tokens for member in members_of(dataset))
    if not train.eval_every:
        return whole
    steps = train.steps or 0
    during = max((steps - 1) // train.eval_every - first_step // train.eval_every, 0)
    if train.eval_tokens == "all":
        return whole * (during + 1)
    return min(train.eval_tokens, whole) * (during + 1) + whole
