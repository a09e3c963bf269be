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
from flatout.measure.runlog import RunLog, typical
from flatout.measure.steps.evidence import (
    FAILURES,
    Counts,
    Evidence,
    Failure,
    GpuFacts,
    HostFacts,
    MemoryFacts,
    Phases,
    Roofline,
    lasting_s,
)
from flatout.storage.json_io import finite_numbers
from flatout.training.run_dir import layout
from flatout.training.run_dir.resume import settings_file

Records = Sequence[Mapping[str, float]]
STARTS = ("start", "resume")
"""Events with which a process of the run starts."""
ENOUGH_S = 30.0
"""Shortest run of which saves are judged.

Of a shorter one the save at the end, and those of evaluations that still improve each time, take a
share that a longer run does not lose.
"""
FAILED = 1
"""Exit code of a run that failed."""


class Events:
    """The lines of events.jsonl. Fields of a different type than expected are omitted."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = lines

    def of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Return the events of some kinds."""
        return [line for line in self.lines if line["event"] in kinds]

    def numbers(self, name: str, *kinds: str) -> list[float]:
        """Return a value of all events of some kinds that have it."""
        found = (finite_numbers(line).get(name) for line in self.of(*kinds))
        return [number for number in found if number is not None]


def recorded_evidence(folder: Path) -> Evidence:
    """Return what a run directory has recorded.

    Raises: CheckpointError when it has no record of a step.
    """
    config, log = layout.read_config(folder), RunLog(folder)
    every = list(log.records())
    steps, events = [one for one in every if "perf/step_ms" in one], Events(log.events)
    failure = _failure(folder, events, steps)
    if not steps and failure is None:
        raise CheckpointError(
            f"{folder} has no record of a step yet.",
            fix="Train it first, or measure its recipe: `flatout diagnose "
            f"{in_shell(settings_file(folder))}`.",
        )
    is_finished = bool(log.summary)
    start = next(iter(events.of(*STARTS)), {})
    sizes = finite_numbers(start)
    speedups = {str(one.get("name")): bool(one.get("on")) for one in events.of("speedup")}
    known = Evidence(
        source="recorded run",
        config=config,
        machine=probe(),
        device=str(start["device"]) if "device" in start else None,
        world_size=int(sizes.get("world_size", 1)),
        parameters=int(sizes["parameters"]) if "parameters" in sizes else None,
        speedups=tuple(name for name, on in speedups.items() if on) if speedups else None,
        compile_fallback=_fallback(events),
        host=_other_processes(every, events),
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


def series_of(records: Records, name: str) -> tuple[tuple[int, float], ...]:
    """Return (step, value) of each record that has one. NaN where it was not finite.

    A record omits such a value, as that of a step without a target, but then steps were skipped.
    """
    known = [one for one in records if name in one or layout.SKIPPED in one]
    return tuple((int(record["step"]), record.get(name, math.nan)) for record in known)


def _of_steps(records: Records, events: Events, *, on_gpu: bool) -> dict[str, Any]:
    """Return the evidence of the recorded steps. Each time is that of the typical step.

    On a GPU, the phases are only those that the host waited for. What remains of the time between
    the first and the last record, without steps and saves, is that of evaluations and samples.
    """
    last, first = records[-1], records[0]
    between = int(last["step"]) - int(first["step"])
    every = int(records[1]["step"] - first["step"]) if len(records) > 1 else int(first["step"])
    steps = max(between + every, 1)

    def figure(name: str, scale: float = 1.0) -> float | None:
        value = typical([record[name] for record in records if name in record])
        return None if value is None else scale * value

    step_s = figure("perf/step_ms", 1e-3) or 0.0
    mean_s = 1e-3 * fmean([record["perf/step_ms"] for record in records[1:] or records])
    blocked_s = [1e-3 * blocked_ms for blocked_ms in events.numbers("blocked_ms", "save")]
    elapsed_s = last.get("elapsed_s", 0.0) - first.get("elapsed_s", 0.0)
    rest_s = max(elapsed_s - between * mean_s - sum(blocked_s), 0.0)
    has_scored = events.of("evaluation", "sample") or any("val/loss" in one for one in records)
    evaluation_s = rest_s / between if between and has_scored else 0.0
    is_enough = last.get("elapsed_s", 0.0) >= ENOUGH_S or not blocked_s
    checkpoint_s = lasting_s(sum(blocked_s) / steps, len(blocked_s)) if is_enough else None
    recompiled = events.of("recompiled")
    lists = (event.get("reasons") for event in recompiled)
    reasons = (str(reason) for each in lists if isinstance(each, list) for reason in each)
    sources = (event.get("peak_source") for event in events.lines)
    used = figure("gpu/util_pct", 0.01)
    return {
        "steps": steps,
        "step_s": step_s + (checkpoint_s or 0.0) + evaluation_s,
        "phases": Phases(
            checkpoint_s=checkpoint_s,
            evaluation_s=evaluation_s,
            data_wait_s=figure("perf/data_wait_ms", 1e-3),
            compile_s=sum(events.numbers("compile_s", "recompiled")) / steps,
            compute_s=None if on_gpu else figure("perf/device_ms", 1e-3),
            logging_s=None if on_gpu else figure("perf/host_ms", 1e-3),
        ),
        "counts": Counts(recompiles=sum(events.numbers("graphs", "recompiled")) / steps),
        "recompile_reasons": tuple(dict.fromkeys(reasons)),
        "memory": MemoryFacts(
            peak_gib=last.get("mem/peak_gib"), reserved_gib=last.get("mem/reserved_gib")
        ),
        "gpu": None if used is None else GpuFacts(utilisation=used),
        "roofline": Roofline(
            peak_tflops=next(iter(events.numbers("peak_tflops", *STARTS)), None),
            peak_source=next((one for one in sources if isinstance(one, str)), None),
            mfu=figure("perf/mfu"),
            tokens_per_s=figure("perf/tokens_per_s"),
        ),
        "losses": series_of(records, "train/loss"),
        "grad_norms": series_of(records, "train/grad_norm"),
        "skipped_steps": len(events.of("skip")),
    }


def _other_processes(records: Records, events: Events) -> HostFacts:
    """Return how busy other processes kept the cores of the run.

    `other_busy_cores` is the mean of the windows in which they left too few for the run's threads,
    if there are any, and `busy_share` is the share of these windows in the recorded time.
    """
    environment = next((one.get("environment") for one in reversed(events.of(*STARTS))), None)
    threads = environment.get("threads") if isinstance(environment, dict) else None
    threads = threads if isinstance(threads, int) and threads > 0 else 1
    windows: list[tuple[float, float, float]] = []  # others, cores, seconds
    since_s = 0.0
    for record in records:
        at_s = record.get("elapsed_s", 0.0)
        if {"cpu/other_cores", "cpu/cores"} <= record.keys() and at_s > since_s:
            windows.append((record["cpu/other_cores"], record["cpu/cores"], at_s - since_s))
            since_s = at_s
    if not windows:
        return HostFacts()
    others, _, seconds = zip(*windows, strict=True)
    busy = [one for one in windows if one[0] + threads > one[1]]
    if not busy:
        return HostFacts(other_busy_cores=fmean(others, seconds))
    others, cores, busy_s = zip(*busy, strict=True)
    return HostFacts(
        cores=int(cores[-1]),
        threads=threads,
        other_busy_cores=fmean(others, busy_s),
        busy_share=sum(busy_s) / sum(seconds),
    )


def _failure(folder: Path, events: Events, records: Records) -> Failure | None:
    """Return why the run ended, if it failed."""
    if layout.read_exit_code(folder) != FAILED:
        return None
    errors = events.of("error")
    if errors:
        error = errors[-1]
        name, what, fix = str(error.get("kind")), str(error.get("what", "")), error.get("fix")
        kind = FAILURES.get(name, "error")
    else:
        kind, what, fix = "error", "The run failed. Its output shows why.", None
    step = int(records[-1]["step"]) if records else None
    known = {"kind": kind, "message": what, "fix": fix, "step": step}
    return Failure.model_validate(known)


def _fallback(events: Events) -> str | None:
    """Return why the last process turned off a speedup that it had turned on: compiling failed."""
    on: set[str] = set()
    reason = None
    for event in events.of("speedup", *STARTS):
        name = str(event.get("name"))
        if event["event"] in STARTS:  # another process decides again
            on, reason = set(), None
        elif event.get("on"):
            on.add(name)
        elif name in on:
            reason = reason or str(event.get("reason"))
    return reason
