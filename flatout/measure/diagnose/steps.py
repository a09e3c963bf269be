"""From the windows of a measured run to evidence: phases, counts, lines, roof."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flatout.assembly.run import Run
from flatout.assembly.selection import speedup_named
from flatout.config.schema import RunConfig
from flatout.errors import FlatoutError
from flatout.measure.diagnose.timers import KeptFigures
from flatout.measure.diagnose.windows import FEW_STEPS, Windows
from flatout.measure.instruments.dividing import compute_on_cpu, step_on_gpu
from flatout.measure.instruments.evidence import CallSite, Counts, Evidence, Phases, Roof
from flatout.measure.instruments.sampling import LineSampler
from flatout.training.checkpoint.retention import steps_between_saves
from flatout.training.evaluation import score
from flatout.training.metrics.log import Log
from flatout.training.saving import DEFAULT_MINUTES_BETWEEN_SAVES, environment_of

SCORED_ROWS = 8
"""Micro-batches of the trial evaluation."""


@dataclass(frozen=True)
class Periodic:
    """Work that is not part of every step, per step; None: not measured, or never done."""

    checkpoint_s: float | None = None
    save_blocked_s: float | None = None
    """Seconds that one save blocks the loop."""
    evaluation_s: float | None = None
    sites: tuple[CallSite, ...] = ()
    """Lines of user code in which a save spends its time."""


def periodic_work(
    run: Run, log: Log, windows: Windows, planned: RunConfig, known: Evidence
) -> Periodic:
    """Save and evaluate once, and divide their times by the steps between them in the real run."""
    blocked_s = evaluation_s = checkpoint_s = None
    sampler = LineSampler(lambda: "checkpoint")
    try:
        with sampler:
            blocked_s = _save(run)
    except (FlatoutError, OSError) as error:
        windows.notes.append(f"A save could not be measured: {error}")
    if blocked_s is not None:
        checkpoint_s = blocked_s / _steps_between_saves(run, planned, windows.step_s)
    if planned.train.eval_every:
        evaluation_s = _evaluation(run, log, planned, known.data.val_tokens or 0)
    return Periodic(checkpoint_s, blocked_s, evaluation_s, sampler.sites(1).get("save", ()))


def _save(run: Run) -> float:
    """Return the seconds for which a save blocks the loop; the second one, which is like the rest.

    Raises: FlatoutError, OSError when the disk refuses it.
    """
    blocked_s = 0.0
    for _ in range(2):
        run.step += 1  # a step is saved once
        run.saver.save(run, environment=environment_of(run), keep=1)
        run.saver.wait()
        blocked_s = sum(saved.blocked_s for saved in run.saver.finished())
    return blocked_s


def _steps_between_saves(run: Run, planned: RunConfig, step_s: float) -> float:
    steps = steps_between_saves(planned.checkpoint, run.steps_per_epoch)
    minutes = planned.checkpoint.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES
    return steps or max(60 * minutes / step_s, 1.0)


def _evaluation(run: Run, log: Log, planned: RunConfig, tokens: int) -> float | None:
    """Return the seconds of evaluation per step, from a part of the validation split."""
    wanted = (
        tokens if planned.train.eval_tokens == "all" else min(planned.train.eval_tokens, tokens)
    )
    few = SCORED_ROWS * run.rows_per_device * run.config.data.seq_len
    start_s = time.perf_counter()
    found = score(run, max_tokens=min(few, wanted), progress=log.progress)
    if found is None:
        return None
    seconds = time.perf_counter() - start_s
    return seconds * wanted / max(found.tokens, 1) / planned.train.eval_every


def evidence_of_steps(
    known: Evidence,
    run: Run,
    windows: Windows,
    periodic: Periodic,
    figures: KeptFigures,
    peak_gib: float | None,
) -> Evidence:
    """Return the evidence with what the windows have measured."""
    extra_s = (periodic.checkpoint_s or 0.0) + (periodic.evaluation_s or 0.0)
    step_s = windows.step_s + extra_s
    dropped = [d for d in run.decisions if not d.on and d.name in (known.speedups or ())]
    failed = [d for d in dropped if speedup_named(d.name).compiles]
    remaining_s = (known.planned_steps or 0) * step_s
    sites = dict(windows.sampler.sites(windows.steps)) if windows.sampler else {}
    if windows.marked is not None:
        sites |= windows.marked.sites(FEW_STEPS)
    if windows.lines is not None:
        sites["op"] = windows.lines.sites(1)
    sites |= {"save": periodic.sites} if periodic.sites else {}
    return known.model_copy(
        update={
            "speedups": tuple(run.speedups),
            "compile_fallback": failed[0].reason if failed else None,
            "steps": windows.steps,
            "step_s": step_s,
            "step_times_s": windows.step_times_s,
            "recompile_reasons": windows.compilations.reasons if windows.compilations else (),
            "phases": phases(known, windows, periodic),
            "counts": counts(known, windows),
            "kernels": windows.trace.shares() if windows.trace else None,
            "counterfactual_s": {
                name: seconds + extra_s for name, seconds in windows.counterfactual_s.items()
            },
            "sites": sites,
            "memory": known.memory.model_copy(update={"peak_gib": peak_gib}),
            "host": known.host.model_copy(update={"other_busy_cores": windows.other_cores}),
            "data": known.data.model_copy(update=_reading(windows)),
            "roof": _roof(known, run, windows),
            "losses": tuple((step, read["train/loss"]) for step, read in figures.read),
            "grad_norms": tuple((step, read["train/grad_norm"]) for step, read in figures.read),
            "remaining_s": remaining_s,
            "notes": (*known.notes, *windows.notes),
        }
    )


def phases(known: Evidence, windows: Windows, periodic: Periodic) -> Phases:
    """Return the phases of an average step, each moment counted once."""
    host, trace = windows.phases, windows.trace
    compiled_s = windows.compilations.compile_s if windows.compilations else 0.0
    shared = {
        "data_wait_s": host.get("data_wait", 0.0),
        "logging_s": host.get("logging", 0.0),
        "gc_s": host.get("gc", 0.0),
        "compile_s": compiled_s / windows.steps,
        "checkpoint_s": periodic.checkpoint_s,
        "evaluation_s": periodic.evaluation_s,
    }
    # what compiling took was inside the step
    compute_s = max(host.get("compute", 0.0) - compiled_s / windows.steps, 0.0)
    if known.on_gpu:
        return (
            Phases(**shared | step_on_gpu(trace, windows.step_s, host))
            if trace
            else Phases(
                data_wait_s=shared["data_wait_s"],
                gc_s=shared["gc_s"],
                compile_s=shared["compile_s"],
                checkpoint_s=periodic.checkpoint_s,
                evaluation_s=periodic.evaluation_s,
            )
        )
    shared["optimizer_s"] = host.get("optimizer", 0.0)
    compiled = any(name.startswith("compile") for name in known.speedups or ())
    if trace is None or compiled:
        return Phases(**shared | {"compute_s": compute_s})
    return Phases(**shared | compute_on_cpu(trace, compute_s))


def counts(known: Evidence, windows: Windows) -> Counts:
    """Return how often things happen in an average step."""
    found: dict[str, float] = {
        "collections": windows.calls.get("gc", 0) / windows.steps,
        "full_collections": windows.full_collections / windows.steps,
    }
    if windows.compilations is not None:
        found["recompiles"] = windows.compilations.graphs / windows.steps
        found["graph_breaks"] = windows.compilations.graph_breaks
    if windows.trace is not None:
        found |= windows.trace.counted()
        if not known.on_gpu:  # their share of ordinary steps, which no profiler slows down
            work_s = windows.phases.get("compute", 0.0) + windows.phases.get("optimizer", 0.0)
            found["tiny_op_s"] = windows.trace.tiny_share() * work_s
    marked = windows.marked
    if marked is not None:
        found |= marked.waits(FEW_STEPS, on_gpu=known.on_gpu)
        found["empty_cache"] = marked.calls["empty-cache"] / FEW_STEPS
        found["empty_cache_s"] = marked.seconds["empty-cache"] / FEW_STEPS
    return Counts(**found)


def _reading(windows: Windows) -> dict[str, float | None]:
    disk = windows.disk
    if disk is None:
        return {}
    return {
        "read_bytes_per_step": None if disk.read_bytes is None else disk.read_bytes / windows.steps,
        "disk_stalled_s": None if disk.stalled_s is None else disk.stalled_s / windows.steps,
    }


def _roof(known: Evidence, run: Run, windows: Windows) -> Roof:
    """Return the distance to the roof of this machine."""
    tokens_per_s = run.tokens_per_step / windows.step_s
    flops = float(run.core.flops_per_token(run.config.data.seq_len).causal_exact)
    achieved = flops * tokens_per_s / 1e12
    peak = run.peak
    share = None if peak is None else achieved / peak.tflops
    return known.roof.model_copy(
        update={
            "peak_tflops": None if peak is None else peak.tflops,
            "peak_source": None if peak is None else peak.source,
            "achieved_tflops": achieved,
            "mfu": share if share is not None and share <= 1 else None,
            "tokens_per_s": tokens_per_s,
        }
    )
