"""Predict the memory, the rate and the duration of a run from what was measured on this hardware.

A value that neither measurements nor a data sheet support is None, and every number has a source.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.assembly.choices import parts_of
from flatout.assembly.measured import BY_TOKENS, EVALUATION_COST, PastRun, similar
from flatout.assembly.memory import (
    CUDA_CONTEXT,
    CUDA_RESERVED,
    MemoryEstimate,
    Workload,
    estimate,
)
from flatout.assembly.resolve import tokens_per_step, tokens_to_score
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.errors import FlatoutError
from flatout.hardware.machine import ASSUMED_MFU, GIB, Machine
from flatout.hardware.roofline import Peak
from flatout.measure.plan.gpu_rate import gpu_time
from flatout.progress import counted

LAST_RUNS = 5
"""How many of the latest runs of one kind are used."""
FIRST_STEP = 64
"""The second number of rows that is tried: with few, the optimizer's step may need the most."""
MOST_ROWS = 2**20
"""Upper bound of the search for the most rows."""
EAGER_MFU, COMPILED_MFU = 0.22, 0.42
"""Measured on an H100 with 124 M parameters: 0.224 eager, 0.410 compiled, and 0.463 for the
eigenstate network on sequences of 32,768 tokens (benchmarks/results/gpu.md)."""
STARTING_S = 15e-6
"""Assumed seconds to start an operation in eager mode, from Python to its backward pass."""
EAGER_ERROR = 0.1
"""Error of the estimate for an eager model, as benchmarks/plan.py measures it."""
CPU_OVERHEAD = GIB // 10
"""Assumed memory of a process on a CPU besides tensors and what it holds before it starts."""
HEAP_HOLES = 2
"""How many times the largest tensor the heap, which keeps freed memory, holds unused: 0 to 5 in 15
runs of two shapes (a vocabulary of 32,768, with 64 and 16 rows).
"""


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted peak memory of one rank, in bytes."""

    estimate: MemoryEstimate
    """The parts, in eager mode."""
    reserved: int
    """What the allocator holds for the tensors."""
    context: int
    """What the process needs besides: the CUDA context, or on a CPU Python, torch and buffers."""
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
    this: PastRun, workload: Workload, *, context: int = 0
) -> tuple[MemoryPrediction | None, str | None]:
    """Return the peak memory of one rank of `this`, or why it cannot be predicted.

    `context` is the memory of this process so far (CPU).
    """
    try:
        found = estimate(workload, this.rows_per_device, this.accumulate)
    except FlatoutError:
        raise
    except Exception as error:  # a custom model may need values, which the trace does not have
        return None, f"{type(error).__name__}: {error}"
    on_gpu, source = workload.on_gpu, "traced in eager mode"
    # glibc's heap: small blocks inside a freed tensor leave a hole that its next one does not fit
    keeps = not on_gpu and platform.libc_ver()[0] == "glibc"
    holes = HEAP_HOLES * found.largest if keeps else 0
    if keeps and BY_TOKENS in this.speedups:  # its shapes differ: measured 0.9 GiB instead of 0.5
        holes = found.total
    spread = None if this.is_compiled else max(EAGER_ERROR, holes / (found.total + holes))
    if this.is_compiled:
        source += ", but a compiled model usually needs less, by an unknown amount"
    reserved = int(CUDA_RESERVED * found.total) if on_gpu else found.total + holes
    context = CUDA_CONTEXT if on_gpu else context + CPU_OVERHEAD
    return MemoryPrediction(found, reserved, context, spread, source, on_gpu), None


def predict_time(
    this: PastRun,
    config: RunConfig,
    *,
    flops_per_token: float,
    peak: Peak | None,
    runs: Sequence[PastRun] = (),
    machine: Machine | None = None,
    dataset: AnyDataset | None = None,
    memory: MemoryPrediction | None = None,
) -> TimePrediction:
    """Return the rate and the duration of `this`, a run of `config` without measurements.

    A run of the same shape with the same speedups decides. Otherwise rates from bench for it, the
    rate of FLOPs that models of similar size reached here, what published runs took on the GPUs of
    a `machine` (`gpu_time`), or an assumed share of the peak. A run whose micro-batch also is the
    same is preferred, and one that had the cores to itself. With the `memory` of an eager run, the
    assumption counts what it takes to start its operations. Rates of other micro-batches are scaled
    by the assumption's ratio for the two.
    """
    steps, world_size = config.train.steps, this.world_size
    unpadded = tokens_per_step(config, dataset)
    # micro-batches by tokens have nearly no padding
    tokens = round(unpadded) if config.batch.by_tokens else config.batch.tokens_per_step or 0
    whole = peak and peak.tflops * 1e12 * world_size / flops_per_token
    needs, here = memory.estimate if memory else None, this.rows_per_device * this.accumulate

    def assumed(rows: int, accumulate: int) -> tuple[float, str]:
        """Return the rate with this micro-batch, and what was assumed."""
        values = {"rows_per_device": rows, "accumulate": accumulate}
        values["tokens_per_step"] = rows * accumulate * tokens // here
        other = config.model_copy(update={"batch": config.batch.model_copy(update=values)})
        return assumed_rate(this, other, whole or 1.0, flops_per_token, needs, machine)

    def preference(run: PastRun) -> tuple[bool, bool, bool, bool]:
        same_rows = run.rows_per_device == this.rows_per_device
        return run.digest == this.digest, run.by == "train", same_rows, not run.is_busy

    chosen = [
        run
        for run in runs
        if run.tokens_per_s
        and (
            run.digest == this.digest
            or (
                (run.kind == this.kind and run.speedups == this.speedups)
                and similar(run.flops_per_token, flops_per_token)
            )
        )
    ]
    best = max(map(preference, chosen), default=(False, False, False, False))
    chosen = [run for run in chosen if preference(run) == best][-LAST_RUNS:]
    is_same, is_train, _, is_alone = best
    (rate, source), rates = assumed(this.rows_per_device, this.accumulate), list[float]()
    for run in chosen:
        scale = rate / assumed(run.rows_per_device, run.accumulate)[0]
        if not is_same:
            scale *= run.flops_per_token / flops_per_token * world_size / run.world_size
        rates.append(scale * run.tokens_per_s)
    if chosen:
        # Whatever disturbs a run makes it slower, so of two the faster one counts.
        rate = statistics.median_high(rates)
        source = counted(len(chosen), "earlier run" if is_train else "bench run")
        source += " of this shape here" if is_same else " of other shapes here, by their FLOP/s"
        source += "" if is_alone else ", while other processes used the cores"
    elif not whole:
        source = "unknown: no peak rate is known for this device"
        return TimePrediction(None, None, None, source, None)
    else:
        rate *= unpadded / tokens
    mfu = rate / whole if whole else None
    if mfu is not None and mfu > 1:  # other processes used the cores while the peak was measured
        mfu = None
    if steps is None:
        return TimePrediction(rate, None, mfu, source, None)
    beside = [  # another run with as many rows finds in torch's cache what this one compiled
        run.beside_s - (run.cached_s if run.rows_per_device == this.rows_per_device else 0.0)
        for run in chosen
        if is_same and run.beside_s is not None
    ]
    wall_s = steps * unpadded / rate + tokens_to_score(config, dataset) / (EVALUATION_COST * rate)
    wall_s += max(statistics.median_low(beside or [0.0]), 0.0)
    misses = [abs(rate / each - 1) for each in rates if is_same]
    return TimePrediction(rate, wall_s, mfu, source, max(misses) if len(misses) > 1 else None)


def assumed_rate(
    this: PastRun,
    config: RunConfig,
    whole: float,
    flops_per_token: float,
    needs: MemoryEstimate | None = None,
    machine: Machine | None = None,
) -> tuple[float, str]:
    """Return the tokens per second of all devices of `this`, and what was assumed.

    `config` may have another micro-batch. `whole` is the token rate at the peak matmul rate. If
    what a step `needs` is known, so are the matmuls of the optimizer and, of a model that is not
    compiled, the operations: a CPU computes after it has started one, a GPU meanwhile. A GPU whose
    data sheet is not known is assumed to reach what an H100 was measured to: see
    benchmarks/results/gpu.md.
    """
    on_gpu, tokens = config.train.device.startswith("cuda"), config.batch.tokens_per_step or 0
    in_optimizer, operations = needs.optimizer_flops if needs else 0, 0
    if needs is not None and not this.is_compiled:
        in_passes = (needs.operations - needs.in_optimizer) // this.accumulate
        operations = in_passes * (config.batch.accumulate or 1) + needs.in_optimizer
    share = (EAGER_MFU if operations else COMPILED_MFU) if on_gpu else ASSUMED_MFU
    work = tokens + this.world_size * in_optimizer / flops_per_token
    computing, computing_s = f"an assumed {share:.0%} of the peak", work / (share * whole)
    known = (
        on_gpu
        and machine
        and gpu_time(
            config,
            machine,
            parts_of(config).arithmetic("cuda"),
            world_size=this.world_size,
            speedups=[*this.speedups, *(["compile"] if this.is_compiled else [])],
            optimizer_flops=in_optimizer,
        )
    )
    if known:
        computing, computing_s = known.describe(), known.step_s
    starting_s = operations * STARTING_S
    starting = f"an assumed {1e6 * STARTING_S:.0f} us to start each of {operations:,} operations"
    if operations and not on_gpu:
        return tokens / (computing_s + starting_s), f"{computing}, and {starting} per step"
    if starting_s > computing_s:
        return tokens / starting_s, f"{starting} per step"
    return tokens / computing_s, computing


def most_rows(workload: Workload, available: int) -> int:
    """Return the most rows with which a step of two micro-batches needs at most `available` bytes.

    0 when not even one row fits.
    """

    def need(rows: int) -> int:
        return estimate(workload, rows, accumulate=2).total

    if need(1) > available:
        return 0
    fits, step, too_many = 1, FIRST_STEP, MOST_ROWS
    while too_many - fits > 1:
        # The need grows almost in proportion, so guesses from its slope are nearly right.
        middle = min(fits + step, too_many - 1)
        per_row = max((need(middle) - need(fits)) // (middle - fits), 1)
        if need(middle) <= available:
            fits = middle
        else:
            too_many = middle
        step = max((available - need(fits)) // per_row, 1)
    return fits
