"""Turns the steps of a profile into figures and a trace file that Perfetto opens."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.assembly.run import Run
from flatout.errors import RunFailed
from flatout.files import CheckedFile
from flatout.hardware import fingerprint
from flatout.measure.instruments.trace import Op
from flatout.measure.profile.events import Range, Recording, read_events
from flatout.measure.profile.memory import CATEGORIES, GIB, Moment, Named, peak_of, timeline
from flatout.measure.profile.report import Profile, Segment, Timeline
from flatout.measure.profile.run import Taken
from flatout.measure.profile.table import ProfileRoof, gaps_of, table_of, work_of
from flatout.roof import peak_bandwidth, peak_tflops

TRACE = "trace.json.gz"
MAX_POINTS = 300
"""Most moments of memory in profile.json, where gaps below 1/300 of a step are left out too."""
MAX_GAPS = 3
"""Most gaps in profile.json and in the text."""
MAX_COUNTERS = 20_000
"""Most moments of memory in the trace."""
NOT_PERMITTED = (
    "The driver shows no kernels: it reserves profiling for administrators. Step times, the host's "
    "lane, memory and the trace of the host are complete; the table and the device's lane are "
    "missing. Allow it with the driver option NVreg_RestrictProfilingToAdminUsers=0, or in a "
    "container with --cap-add=SYS_ADMIN."
)


def summarise(run: Run, taken: Taken, raw: Path, out: Path) -> Profile:
    """Return the profile of the steps that were taken; write their trace to `out`.

    Raises: RunFailed when the profiler could not write its trace.
    """
    device = str(run.mesh.device)
    step_s = taken.profiled_s / taken.steps
    profile = Profile(
        recipe=run.config.name,
        device=device,
        arithmetic=run.arithmetic,
        speedups=tuple(run.speedups),
        environment=fingerprint(device),
        first_step=taken.first_step or 1,
        steps=taken.steps,
        step_s=taken.step_s,
        profiled_step_s=step_s,
        phases_s=taken.phases_s or None,
        table=None,
        outside_s=None,
        roof=roof_of(run),
        timeline=None,
        memory=None,
        has_snapshot=taken.has_snapshot,
        notes=tuple(taken.notes),
    )
    if not taken.is_traced:
        return profile
    document = trace_document(raw)
    recording = read_events(
        document, wall_s=taken.profiled_s, list_item_bytes=weight_item_bytes(run)
    )
    moments = memory_of(recording, taken.named, device)
    write_trace(document, recording, moments, out / TRACE)
    return profile.model_copy(update=figures_of(profile, recording, moments))


def figures_of(profile: Profile, recording: Recording, moments: Sequence[Moment]) -> dict[str, Any]:
    """Return the fields of a profile that come from its trace."""
    trace, on_gpu = recording.trace, profile.device != "cpu"
    found: dict[str, Any] = {
        "timeline": timeline_of(recording, moments, profile.first_step, on_gpu=on_gpu),
        "memory": peak_of(moments, recording, profile.first_step),
    }
    if on_gpu and not trace.kernels:
        return found | {"notes": (*profile.notes, NOT_PERMITTED)}
    work = work_of(trace.ops, trace.kernels)
    busy_s = trace.busy_s() if on_gpu else sum(op.self_s for op in work) / profile.steps
    return found | {
        "table": table_of(work, steps=profile.steps, roof=profile.roof),
        "outside_s": max(profile.profiled_step_s - (busy_s or 0.0), 0.0),
    }


def roof_of(run: Run) -> ProfileRoof:
    """Return what the device can do at most, from its data sheet or measured here."""
    device = str(run.mesh.device)
    peak = peak_tflops(run.machine, device, run.arithmetic)
    bandwidth = peak_bandwidth(run.machine, device)
    return ProfileRoof(
        peak_tflops=peak.tflops if peak else None,
        peak_source=peak.source if peak else None,
        gb_per_s=bandwidth.gb_per_s,
        bandwidth_source=bandwidth.source,
    )


def weight_item_bytes(run: Run) -> int | None:
    """Return the size of an element of the trained weights; None when there are several."""
    sizes = {weight.element_size() for weight in run.trained()}
    return sizes.pop() if len(sizes) == 1 else None


def trace_document(raw: Path) -> dict[str, Any]:
    """Return the profiler's own file.

    Raises: RunFailed when it is not complete: the profiler does not report a disk that is full.
    """
    try:
        # a rate over 0 s is inf there, which is no JSON
        document: dict[str, Any] = json.loads(raw.read_bytes(), parse_constant=lambda _: None)
        document["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFailed(
            f"The profiler could not write its trace to {raw.parent.parent}.",
            fix="The usual cause is a full disk: free space there, use --out on another disk, or "
            "profile fewer steps with --steps.",
        ) from error
    return document


def memory_of(recording: Recording, named: Named | None, device: str) -> tuple[Moment, ...]:
    """Return the memory of the training device over the profiled steps."""
    if named is None:
        return ()
    on_cpu = device == "cpu"
    return timeline(
        recording, recording.host_allocations if on_cpu else recording.device_allocations, named
    )


def write_trace(
    document: dict[str, Any], recording: Recording, moments: Sequence[Moment], path: Path
) -> None:
    """Write the trace, compressed, with one counter for each category of memory."""
    events = document["traceEvents"]
    pid = next((event["pid"] for event in events if event.get("cat") == "cpu_op"), 0)
    for moment in thinned(moments, MAX_COUNTERS):
        events.append(
            {
                "ph": "C",
                "pid": pid,
                "name": "memory (MiB)",
                "ts": recording.origin_us + 1e6 * moment.time_s,
                "args": {name: moment.bytes.get(name, 0) / 2**20 for name in CATEGORIES},
            }
        )
    packed = gzip.compress(json.dumps(document).encode(), compresslevel=6)
    with CheckedFile(path) as file:
        file.write(np.frombuffer(packed, np.uint8))


def thinned(moments: Sequence[Moment], most: int) -> Iterator[Moment]:
    """Yield the moments, of each group that would be too many only the one with most memory."""
    size = max(-(-len(moments) // most), 1)
    for start in range(0, len(moments), size):
        yield max(moments[start : start + size], key=lambda moment: moment.total)


def timeline_of(
    recording: Recording, moments: Sequence[Moment], first: int, *, on_gpu: bool
) -> Timeline | None:
    """Return the timeline of the step with the median duration; None without steps."""
    steps = recording.steps
    if not steps:
        return None
    order = sorted(range(len(steps)), key=lambda at: steps[at].end_s - steps[at].start_s)
    number = order[len(order) // 2]
    step, kernels = steps[number], recording.trace.kernels
    seconds = step.end_s - step.start_s
    host = [one for one in recording.phases if step.start_s <= one.start_s < step.end_s]
    segments = [_segment("host", one, step) for one in host]
    gaps = idle = None
    if on_gpu and kernels:
        device = [op for op in kernels if op.start_s < step.end_s and op.end_s > step.start_s]
        segments += [_segment("device", one, step) for one in _joined(device, seconds / MAX_POINTS)]
        gaps = gaps_of(kernels, recording.trace.ops, step, recording.phases)
        idle = sum(gap.seconds for gap in gaps) / seconds if seconds else None
    inside = [one for one in moments if step.start_s <= one.time_s <= step.end_s]
    return Timeline(
        step=first + number,
        seconds=seconds,
        segments=tuple(segments),
        gaps=gaps and gaps[:MAX_GAPS],
        device_idle=idle,
        memory=tuple(
            (one.time_s - step.start_s, one.total / GIB) for one in thinned(inside, MAX_POINTS)
        ),
    )


def _segment(lane: str, one: Range, step: Range) -> Segment:
    start_s, end_s = max(one.start_s, step.start_s), min(one.end_s, step.end_s)
    return Segment(
        lane=lane, phase=one.name, start_s=start_s - step.start_s, seconds=end_s - start_s
    )


def _joined(kernels: Iterable[Op], gap_s: float) -> Iterator[Range]:
    """Yield ranges of consecutive kernels of one phase, without gaps longer than `gap_s`."""
    current: Range | None = None
    for op in sorted(kernels, key=lambda op: op.start_s):
        name = op.within or "logging"
        if current and current.name == name and op.start_s <= current.end_s + gap_s:
            current = Range(name, current.start_s, max(current.end_s, op.end_s))
            continue
        if current:
            yield current
        current = Range(name, op.start_s, op.end_s)
    if current:
        yield current
