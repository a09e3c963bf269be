"""What the files of a run directory say about where its time went. No torch.

`metrics.jsonl` divides steps into data wait, host and device; `events.jsonl` has saves, skipped
updates and compilations. Damaged lines, such as a kill leaves, are left out, and a note says so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flatout.errors import CheckpointError, in_shell
from flatout.hardware import probe
from flatout.json_io import finite_numbers
from flatout.measure.runlog import RunLog
from flatout.measure.steps.evidence import (
    Counts,
    Evidence,
    Failure,
    GpuFacts,
    MemoryFacts,
    Phases,
    Roof,
)
from flatout.training.run_dir import layout

Records = Sequence[Mapping[str, float]]
FAILED = 1
"""Exit code of a run that failed."""
KINDS = {
    "OutOfMemory": "out-of-memory",
    "MissingPackage": "missing-package",
    "DataError": "no-data",
}
"""Kinds of failure by the class of the error."""
EVENT_FIGURES = {"blocked_ms", "compile_s", "graphs", "parameters", "peak_tflops", "world_size"}
"""Fields of events that are read as numbers."""
EVENT_TYPES = {"peak_source": str, "reasons": list}
"""Types of other fields."""


def recorded_evidence(folder: Path) -> Evidence:
    """Return what a run directory has recorded.

    Raises: CheckpointError when it has no record of a step.
    """
    config, log = layout.read_config(folder), RunLog(folder)
    steps = [record for record in log.records() if "perf/step_ms" in record]
    events = list(map(_typed, log.events))
    failure = _failure(folder, events, steps)
    if not steps and failure is None:
        raise CheckpointError(
            f"{folder} has no record of a step yet.",
            fix="Train it first, or measure its recipe: `flatout diagnose "
            f"{in_shell(layout.settings_file(folder))}`.",
        )
    is_finished = bool(log.summary)
    start = next((one for one in events if one["event"] in ("start", "resume")), {})
    known = Evidence(
        source="recorded run",
        config=config,
        machine=probe(),
        device=str(start["device"]) if "device" in start else None,
        world_size=int(start.get("world_size", 1)),
        parameters=int(start["parameters"]) if "parameters" in start else None,
        speedups=_speedups(events),
        compile_fallback=_fallback(events),
        failure=failure,
        notes=tuple(log.notes),
    )
    if not steps:
        return known
    update = _of_steps(steps, events, on_gpu=known.on_gpu)
    if config is not None:
        step, planned = int(steps[-1]["step"]), config.train.steps
        update |= {"tokens_per_step": config.batch.tokens_per_step, "planned_steps": planned}
        if planned is not None and not is_finished:
            update["remaining_s"] = max(planned - step, 0) * update["step_s"]
        if planned is not None and step and "train/epoch" in steps[-1]:
            update["epochs"] = steps[-1]["train/epoch"] * planned / step
    return known.model_copy(update=update)


def _typed(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event without the fields that are not of their type."""
    numbers = finite_numbers(event)
    return {
        name: value
        for name, value in event.items()
        if isinstance(value, EVENT_TYPES.get(name, object))
        and (name not in EVENT_FIGURES or name in numbers)
    }


def _of_steps(records: Records, events: Sequence[dict[str, Any]], *, on_gpu: bool) -> Any:
    """Return the evidence of the recorded steps; the first record is warm-up.

    On a GPU, the phases are only those that the host waited for. What remains of the time between
    the first and the last record, without steps and saves, is that of evaluations and samples.
    """
    steady, last, first = records[1:] or records, records[-1], records[0]
    between = int(last["step"]) - int(first["step"])
    every = int(records[1]["step"] - first["step"]) if len(records) > 1 else int(first["step"])
    steps = max(between + every, 1)
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        of[event["event"]].append(event)

    def mean(name: str, scale: float = 1e-3) -> float | None:
        values = [record[name] for record in steady if name in record]
        return scale * fmean(values) if values else None

    def rate(name: str) -> float | None:
        """Return the rate over all records, each weighted by its time."""
        known = [r for r in steady if name in r and r["perf/step_ms"] > 0]
        weights = [record["perf/step_ms"] for record in known]
        return fmean([record[name] for record in known], weights) if known else None

    def series(name: str) -> tuple[tuple[int, float], ...]:
        return tuple((int(record["step"]), record.get(name, math.nan)) for record in records)

    train_s = mean("perf/step_ms") or 0.0
    blocked_s = 1e-3 * sum(event.get("blocked_ms", 0.0) for event in of["save"])
    elapsed_s = last.get("elapsed_s", 0.0) - first.get("elapsed_s", 0.0)
    rest_s = max(elapsed_s - between * train_s - blocked_s, 0.0)
    has_scored = of["evaluation"] or of["sample"] or any("val/loss" in one for one in records)
    evaluation_s = rest_s / between if between and has_scored else 0.0
    recompiled = of["recompiled"]
    reasons = (str(reason) for event in recompiled for reason in event.get("reasons", ()))
    used = mean("gpu/util_pct", 0.01)
    return {
        "steps": steps,
        "step_s": train_s + blocked_s / steps + evaluation_s,
        "step_times_s": tuple(1e-3 * record["perf/step_ms"] for record in steady),
        "phases": Phases(
            checkpoint_s=blocked_s / steps,
            evaluation_s=evaluation_s,
            data_wait_s=mean("perf/data_wait_ms"),
            compile_s=sum(event.get("compile_s", 0.0) for event in recompiled) / steps,
            compute_s=None if on_gpu else mean("perf/device_ms"),
            logging_s=None if on_gpu else mean("perf/host_ms"),
        ),
        "counts": Counts(recompiles=sum(int(e.get("graphs", 0)) for e in recompiled) / steps),
        "recompile_reasons": tuple(dict.fromkeys(reasons)),
        "memory": MemoryFacts(
            peak_gib=last.get("mem/peak_gib"), reserved_gib=last.get("mem/reserved_gib")
        ),
        "gpu": None if used is None else GpuFacts(utilisation=used),
        "roof": Roof(
            peak_tflops=next((e["peak_tflops"] for e in events if "peak_tflops" in e), None),
            peak_source=next((e["peak_source"] for e in events if e.get("peak_source")), None),
            mfu=rate("perf/mfu"),
            tokens_per_s=rate("perf/tokens_per_s"),
        ),
        "losses": series("train/loss"),
        "grad_norms": series("train/grad_norm"),
        "skipped_steps": len(of["skip"]),
    }


def _failure(folder: Path, events: Sequence[Mapping[str, Any]], records: Records) -> Failure | None:
    """Return why the run ended, if it failed; records leave out a loss that is not a number."""
    if layout.read_exit_code(folder) != FAILED:
        return None
    step = int(records[-1]["step"]) if records else None
    is_lost = bool(records) and "train/loss" not in records[-1]
    error = next((event for event in reversed(events) if event["event"] == "error"), None)
    if error is None:
        if is_lost and any("train/loss" in record for record in records):
            what = "The loss is not a number: training has diverged."
            return Failure(kind="diverged", message=what, step=step)
        what = "The run failed; its output says why."
        return Failure(kind="error", message=what, step=step)
    kind, what = str(error.get("kind")), str(error.get("what", ""))
    has_diverged = kind == "RunFailed" and (is_lost or "has diverged" in what)
    return Failure.model_validate(
        {
            "kind": "diverged" if has_diverged else KINDS.get(kind, "error"),
            "message": what,
            "fix": error.get("fix"),
            "step": step,
        }
    )


def _speedups(events: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """Return the speedups that were on at the end; None when no event tells."""
    on = {str(e.get("name")): bool(e.get("on")) for e in events if e["event"] == "speedup"}
    return tuple(name for name, is_on in on.items() if is_on) if on else None


def _fallback(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the last process turned off a speedup that it had turned on: compiling failed."""
    on: set[str] = set()
    reason = None
    for event in events:
        name = str(event.get("name"))
        if event["event"] in ("start", "resume"):  # another process decides again
            on, reason = set(), None
        elif event["event"] == "speedup" and event.get("on"):
            on.add(name)
        elif event["event"] == "speedup" and name in on:
            reason = reason or str(event.get("reason"))
    return reason
