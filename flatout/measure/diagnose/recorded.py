"""What the files of a run directory show about where its time went. No torch.

`metrics.jsonl` divides steps into data wait, host and device. `events.jsonl` has saves, skipped
updates and compilations. Damaged lines, such as a kill leaves, are skipped, and a note reports
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flatout.errors import CheckpointError, in_shell
from flatout.hardware.machine import probe
from flatout.measure.evidence import FAILURES, Evidence, Failure, lasting_s, typical
from flatout.storage.json_io import JsonObject, finite_numbers
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import STARTS, RunLog

Records = Sequence[Mapping[str, float]]
ENOUGH_S = 30.0
"""Shortest run of which saves are judged.

Of a shorter one the save at the end, and those of evaluations that still improve each time, take a
share that a longer run does not lose.
"""
LOW_USE = 60.0
"""Percent of the time in which a GPU works, below which the rest of the step is the host's."""


def recorded_evidence(folder: Path) -> Evidence:
    """Return what a run directory has recorded.

    Raises: CheckpointError when it has no record of a step.
    """
    config, log = layout.read_config(folder), RunLog(folder)
    records, events, has_failed = list(log.records()), log.events, log.state == "failed"
    steps = [one for one in records if "perf/step_ms" in one]
    if not steps and not has_failed:
        raise CheckpointError(
            f"{folder} has no record of a step yet.",
            fix="Train it first, or measure its recipe: `flatout diagnose "
            f"{in_shell(folder / layout.CONFIG)}`.",
        )
    start = next((one for one in events if one["event"] in STARTS), {})
    device = str(start["device"]) if "device" in start else None
    found, at = _other_processes(records, events) | _speedups(log.attempt), None
    if steps:
        at = int(steps[-1]["step"])
        found |= _of_steps(steps, events, on_gpu=str(device).startswith("cuda"))
    if at and config is not None and config.train.steps is not None:
        planned = found["planned_steps"] = config.train.steps
        found["epochs"] = steps[-1].get("train/epoch", 0.0) * planned / at
        if not log.summary:
            found["remaining_s"] = max(planned - at, 0) * found["step_s"]
    if found.get("steps", 10) < 10:
        log.notes.append("The run has taken few steps, and the first ones are slower than others.")
    if has_failed:
        exits = [one for one in events if one["event"] == "exit" and "what" in one]
        error = exits[-1] if exits else {"what": "The run failed. Its output shows why."}
        kind = FAILURES.get(str(error.get("kind")), "error")
        found["failure"] = Failure(
            kind=kind, message=str(error["what"]), fix=error.get("fix"), step=at
        )
    return Evidence(
        source="recorded run",
        config=config,
        machine=probe(),
        device=device,
        world_size=int(finite_numbers(start).get("world_size", 1)),
        notes=tuple(log.notes),
        **found,
    )


def series_of(records: Records, name: str) -> tuple[tuple[int, float], ...]:
    """Return (step, value) of each record that has one. NaN where it was not finite.

    A record omits such a value, as that of a step without a target, but then steps were skipped.
    """
    known = [one for one in records if name in one or layout.SKIPPED in one]
    return tuple((int(record["step"]), record.get(name, math.nan)) for record in known)


def _of_steps(records: Records, events: Sequence[JsonObject], *, on_gpu: bool) -> dict[str, Any]:
    """Return the evidence of the recorded steps. Each time is that of the typical step.

    On a GPU, the phases are only those that the host waited for. What remains of the time between
    the first and the last record, without steps and saves, is that of evaluations and samples.
    """

    def usual(name: str, scale: float = 1e-3) -> float | None:
        """Return the typical value of a metric."""
        value = typical([record[name] for record in records if name in record])
        return value and scale * value

    def of(kind: str, name: str) -> list[float]:
        """Return a value of all events of a kind that have it."""
        found = (finite_numbers(one) for one in events if one["event"] == kind)
        return [one[name] for one in found if name in one]

    def texts(name: str, kind: type) -> list[Any]:
        """Return a field of all events that have one of this type."""
        return [one[name] for one in events if isinstance(one.get(name), kind)]

    first, last, blocked = records[0], records[-1], of("save", "blocked_ms")
    between = int(last["step"] - first["step"])
    steps = max(between + int(records[:2][-1]["step"] - first["step"] or first["step"]), 1)
    step_s, save_s = usual("perf/step_ms") or 0.0, 1e-3 * sum(blocked)
    mean_s = 1e-3 * fmean(record["perf/step_ms"] for record in records[1:] or records)
    elapsed_s = last.get("elapsed_s", 0.0)
    rest_s = max(elapsed_s - first.get("elapsed_s", 0.0) - between * mean_s - save_s, 0.0)
    scores = any(one["event"] in ("evaluation", "sample") for one in events)
    scores |= any("val/loss" in one for one in records)
    evaluation_s = rest_s / between if between and scores else 0.0
    is_enough = elapsed_s >= ENOUGH_S or not blocked
    checkpoint_s = lasting_s(save_s / steps, len(blocked)) if is_enough else None
    used, reasons = usual("gpu/util_pct", 1.0), texts("reasons", list)
    phases = {"compute_s": usual("perf/device_ms"), "logging_s": usual("perf/host_ms")}
    if on_gpu:
        phases = {"host_s": (1 - used / 100) * step_s} if used and used < LOW_USE else {}
    return phases | {
        "steps": steps,
        "step_s": step_s + (checkpoint_s or 0.0) + evaluation_s,
        "data_wait_s": usual("perf/data_wait_ms"),
        "checkpoint_s": checkpoint_s,
        "evaluation_s": evaluation_s,
        "compile_s": sum(of("recompiled", "compile_s")) / steps,
        "recompiles": sum(of("recompiled", "graphs")) / steps,
        "recompile_reason": next((str(one) for each in reasons for one in each), None),
        "peak_gib": last.get("mem/peak_gib"),
        "reserved_gib": last.get("mem/reserved_gib"),
        "peak_tflops": next(iter(of("start", "peak_tflops")), None),
        "peak_source": next(iter(texts("peak_source", str)), None),
        "mfu": usual("perf/mfu", 1.0),
        "tokens_per_s": usual("perf/tokens_per_s", 1.0),
        "losses": series_of(records, "train/loss"),
        "skipped_steps": sum(one["event"] == "skip" for one in events),
    }


def _other_processes(records: Records, events: Sequence[JsonObject]) -> dict[str, Any]:
    """Return how busy other processes kept the cores of the run, which with what threads it had."""
    stated = [one["environment"] for one in events if isinstance(one.get("environment"), dict)]
    threads = int(finite_numbers(stated[-1]).get("threads", 1)) if stated else 1
    both = {"cpu/other_cores", "cpu/cores"}
    known = [[one[name] for name in sorted(both)] for one in records if both <= one.keys()]
    if not known:
        return {}
    cores, others = map(fmean, zip(*known, strict=True))
    if others + threads <= cores:
        return {"other_busy_cores": others}
    return {"other_busy_cores": others, "cores": int(cores), "threads": threads}


def _speedups(events: Sequence[JsonObject]) -> dict[str, Any]:
    """Return the speedups that are on in an attempt, and why one was turned off again.

    Then compiling failed. Nothing where the files do not tell.
    """
    states, found = dict[str, bool](), dict[str, Any]()
    for event in events:
        if event["event"] == "speedup":
            name, is_on = str(event.get("name")), bool(event.get("on"))
            if states.get(name) and not is_on:
                found.setdefault("compile_fallback", str(event.get("reason")))
            states[name] = is_on
    if states:
        found["speedups"] = tuple(name for name, is_on in states.items() if is_on)
    return found
