"""What the files of a run directory say about where its time went. No torch.

`metrics.jsonl` divides steps into data wait, host and device; `events.jsonl` has saves, skipped
updates and compilations. Damaged lines, such as a kill leaves, are left out, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, FlatoutError, in_shell
from flatout.hardware import probe
from flatout.json_io import JsonObject, LineReader, finite_numbers
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
    config = layout.read_config(folder)
    notes: list[str] = []
    records = _with_a_step(_lines(folder / layout.METRICS, notes), notes)
    events = [_typed(event) for event in _lines(folder / layout.EVENTS, notes)]
    steps = [record for record in records if "perf/step_ms" in record]
    failure = _failure(folder, events, steps)
    if not steps and failure is None:
        raise CheckpointError(
            f"{folder} has no record of a step yet.",
            fix="Train it first, or measure its recipe: `flatout diagnose "
            f"{in_shell(layout.settings_file(folder))}`.",
        )
    summary = _summary(folder, notes)
    start = next((one for one in events if one.get("event") in ("start", "resume")), {})
    known = Evidence(
        source="recorded run",
        config=config,
        machine=probe(),
        device=str(start["device"]) if "device" in start else None,
        world_size=int(start.get("world_size") or 1),
        parameters=int(start["parameters"]) if "parameters" in start else None,
        speedups=_speedups(events),
        compile_fallback=_fallback(events),
        failure=failure,
        notes=tuple(notes),
    )
    return _with_steps(known, config, steps, events, summary) if steps else known


def _lines(path: Path, notes: list[str]) -> list[JsonObject]:
    """Return the JSON objects in a file's lines, with notes about what was left out."""
    reader = LineReader(path)
    try:
        found = list(reader.read())
    except CheckpointError as error:
        notes.append(error.what)
        return []
    notes += reader.notes()
    return found


def _with_a_step(lines: Sequence[JsonObject], notes: list[str]) -> list[dict[str, float]]:
    """Return the records that state a step, with their finite numbers and nothing else."""
    found = list(map(finite_numbers, lines))
    kept = [record for record in found if "step" in record]
    if without := len(found) - len(kept):
        notes.append(f"Records of metrics.jsonl without a step were left out: {without}.")
    return kept


def _typed(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event without the fields that are not of their type."""
    numbers = finite_numbers(event)
    return {
        name: value
        for name, value in event.items()
        if isinstance(value, EVENT_TYPES.get(name, object))
        and (name not in EVENT_FIGURES or name in numbers)
    }


def _with_steps(
    known: Evidence,
    config: RunConfig | None,
    records: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> Evidence:
    """Return the evidence with the figures of the recorded steps; the first record is warm-up."""
    steady = records[1:] or records
    last, first = records[-1], records[0]
    step = int(last["step"])
    steps = step - int(first["step"]) + _interval(records)
    train_s = _seconds(steady, "perf/step_ms") or 0.0
    around = _around(records, events, train_s, steps)
    step_s = train_s + around["checkpoint_s"] + around["evaluation_s"]
    planned = config.train.steps if config is not None else None
    tokens = config.batch.tokens_per_step if config is not None else None
    return known.model_copy(
        update={
            "steps": steps,
            "step_s": step_s,
            "step_times_s": tuple(1e-3 * record["perf/step_ms"] for record in steady),
            "phases": _phases(known, steady, events, around, steps),
            **_compilations([event for event in events if _is(event, "recompiled")], steps),
            "memory": MemoryFacts(
                peak_gib=_number(last, "mem/peak_gib"),
                reserved_gib=_number(last, "mem/reserved_gib"),
            ),
            "gpu": _gpu(steady),
            "tokens_per_step": tokens,
            "planned_steps": planned,
            "epochs": _epochs(last, step, planned),
            "roof": Roof(
                peak_tflops=_first_number(events, "peak_tflops"),
                peak_source=next((e["peak_source"] for e in events if e.get("peak_source")), None),
                mfu=_rate_or_none(steady, "perf/mfu"),
                tokens_per_s=_rate_or_none(steady, "perf/tokens_per_s"),
            ),
            "losses": _series(records, "train/loss"),
            "grad_norms": _series(records, "train/grad_norm"),
            "skipped_steps": sum(_is(event, "skip") for event in events),
            "remaining_s": None if planned is None or summary else max(planned - step, 0) * step_s,
        }
    )


def _compilations(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Return how often code was compiled again, and why."""
    graphs = sum(int(event.get("graphs") or 0) for event in events)
    reasons = (str(reason) for event in events for reason in event.get("reasons") or ())
    return {
        "counts": Counts(recompiles=graphs / max(steps, 1)),
        "recompile_reasons": tuple(dict.fromkeys(reasons)),
    }


def _phases(
    known: Evidence,
    records: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    around: Mapping[str, float],
    steps: int,
) -> Phases:
    """Return the phases that records tell apart; on a GPU, only what the host waited for."""
    compiled_s = sum(float(e.get("compile_s") or 0.0) for e in events if _is(e, "recompiled"))
    wait_s = _seconds(records, "perf/data_wait_ms")
    apart = {**around, "data_wait_s": wait_s, "compile_s": compiled_s / max(steps, 1)}
    if known.on_gpu:
        return Phases(**apart)
    return Phases(
        **apart,
        compute_s=_seconds(records, "perf/device_ms"),
        logging_s=_seconds(records, "perf/host_ms"),
    )


def _around(
    records: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    train_s: float,
    steps: int,
) -> dict[str, float]:
    """Return the seconds per step of saves, and of evaluation and samples.

    The latter is what remains of the time between the first and the last record.
    """
    blocked_s = 1e-3 * sum(float(e.get("blocked_ms") or 0.0) for e in events if _is(e, "save"))
    between = int(records[-1]["step"]) - int(records[0]["step"])
    elapsed_s = float(records[-1].get("elapsed_s") or 0) - float(records[0].get("elapsed_s") or 0)
    rest_s = max(elapsed_s - between * train_s - blocked_s, 0.0) if between else 0.0
    scored = any("val/loss" in record for record in records) or any(
        _is(event, "evaluation") or _is(event, "sample") for event in events
    )
    return {
        "checkpoint_s": blocked_s / max(steps, 1),
        "evaluation_s": rest_s / between if between and scored else 0.0,
    }


def _failure(
    folder: Path, events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> Failure | None:
    """Return why the run ended, if it failed."""
    if layout.read_exit_code(folder) != FAILED:
        return None
    step = int(records[-1]["step"]) if records else None
    error = next((event for event in reversed(events) if _is(event, "error")), None)
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    if error is None:
        lost = bool(records) and "train/loss" not in records[-1] and bool(losses)
        return Failure(
            kind="diverged" if lost else "error",
            message="The loss is not a number: training has diverged."
            if lost
            else "The run failed; its output says why.",
            step=step,
        )
    message, fix = str(error.get("what", "")), error.get("fix")
    kind = KINDS.get(str(error.get("kind")), "error")
    has_diverged = _lost(records) or "has diverged" in message
    if kind == "error" and error.get("kind") == "RunFailed" and has_diverged:
        kind = "diverged"
    return Failure.model_validate({"kind": kind, "message": message, "fix": fix, "step": step})


def _lost(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last record lacks its loss, as JSON cannot represent NaN."""
    return bool(records) and "train/loss" not in records[-1]


def _speedups(events: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """Return the speedups that were on at the end; None when no event tells."""
    on = {str(e.get("name")): bool(e.get("on")) for e in events if _is(e, "speedup")}
    return tuple(name for name, is_on in on.items() if is_on) if on else None


def _fallback(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the last process turned off a speedup that it had turned on: compiling failed."""
    on: set[str] = set()
    reason = None
    for event in events:
        if _is(event, "start") or _is(event, "resume"):  # another process decides again
            on, reason = set(), None
        elif _is(event, "speedup") and event.get("on"):
            on.add(str(event.get("name")))
        elif _is(event, "speedup") and str(event.get("name")) in on:
            reason = reason or str(event.get("reason"))
    return reason


def _summary(folder: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        return layout.read_summary(folder) or {}
    except FlatoutError as error:
        notes.append(error.what)
        return {}


def _gpu(records: Sequence[Mapping[str, Any]]) -> GpuFacts | None:
    used = _mean_or_none(records, "gpu/util_pct")
    return None if used is None else GpuFacts(utilisation=used / 100)


def _epochs(last: Mapping[str, Any], step: int, planned: int | None) -> float | None:
    epoch = _number(last, "train/epoch")
    return None if epoch is None or planned is None or not step else epoch * planned / step


def _interval(records: Sequence[Mapping[str, Any]]) -> int:
    """Return the steps of the first record."""
    return (
        int(records[0]["step"])
        if len(records) < 2
        else int(records[1]["step"]) - int(records[0]["step"])
    )


def _series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    return tuple((int(record["step"]), float(record.get(name, math.nan))) for record in records)


def _seconds(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a figure in milliseconds as seconds; None when no record has it."""
    mean_ms = _mean_or_none(records, name)
    return None if mean_ms is None else 1e-3 * mean_ms


def _rate_or_none(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the rate over all records, each weighted by its time; None when none has both."""
    known = [record for record in records if name in record and record["perf/step_ms"] > 0]
    if not known:
        return None
    return fmean([one[name] for one in known], [one["perf/step_ms"] for one in known])


def _mean_or_none(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(record[name]) for record in records if name in record]
    return fmean(values) if values else None


def _number(record: Mapping[str, Any], name: str) -> float | None:
    return float(record[name]) if name in record else None


def _first_number(events: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((float(event[name]) for event in events if event.get(name) is not None), None)


def _is(event: Mapping[str, Any], kind: str) -> bool:
    return event.get("event") == kind
