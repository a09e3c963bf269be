"""Records steps with torch.profiler and reads the trace: operations, kernels, phases.

    with profiling(device) as profiler, phase_ranges(timer):
        ...  # some steps
    trace = read_trace(exported(profiler, path), steps=2)

The trace is Chrome's JSON, which is the same in all versions of torch. Lines of user code come
from `calls.py`: the profiler's stacks lack them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flatout.errors import RunFailed
from flatout.measure.steps.evidence import KernelRow
from flatout.measure.steps.kernels import KINDS, TELLING, is_generated, kind_of
from flatout.training.metrics.phases import GC, PhaseTimer

PREFIX = "flatout."
"""Start of the names of the ranges that mark steps and their phases."""
STEP = "step"
"""The range of a whole step."""
TINY_S = 20e-6
"""An operation that takes less costs about as much to start as to run."""
LAUNCH_S = 5e-6
"""Host time that starting one operation takes at least, added to the time of tiny ones."""
SEPARATE = frozenset({"communication", "copy"})
"""Classes that operations in the optimizer's step keep. The others become `optimizer`."""
NOT_WORK = ("autograd::", "torch::autograd::")
"""Start of the names of operations that only call others."""
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Range:
    """A step, or a part of one that is in one phase."""

    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s

    def contains(self, time_s: float) -> bool:
        """Return whether a time is in the range."""
        return self.start_s <= time_s <= self.end_s


@dataclass(frozen=True)
class Op:
    """An operation of the host, or a kernel or copy of the device."""

    name: str
    """Its name: `aten::mm`, or the kernel's."""
    start_s: float
    """Start, from the beginning of the trace."""
    seconds: float
    """Duration, with the operations that it calls."""
    self_s: float
    """Duration without them."""
    parent: str | None = None
    """The operation that called it."""
    within: str | None = None
    """The phase in which the host started it."""
    launched_by: str | None = None
    """The host's operation that started a kernel."""

    @property
    def kind(self) -> str:
        """Class of the operation, one of `kernels.KINDS`.

        A kernel without a telling name has the class of the operation that started it.
        """
        kind = kind_of(self.name)
        if self.launched_by and kind not in TELLING and not is_generated(self.name):
            started = kind_of(self.launched_by)
            kind = kind if started == "other" else started
        return "optimizer" if self.within == "optimizer" and kind not in SEPARATE else kind

    @property
    def end_s(self) -> float:
        """End, from the beginning of the trace."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Trace:
    """Everything that is read from the trace of some steps, in order of time."""

    ops: tuple[Op, ...]
    """Operations of the host."""
    kernels: tuple[Op, ...]
    """Kernels and copies of the device. () on a CPU, or when the profiler may not see them."""
    steps: int
    """Steps in the trace."""
    phases: tuple[Range, ...] = ()
    step_ranges: tuple[Range, ...] = ()

    @cached_property
    def _starts(self) -> list[float]:
        return [phase.start_s for phase in self.phases]

    def phase_at(self, time_s: float) -> str | None:
        """Return the name of the phase at a time. None between phases."""
        at = bisect_right(self._starts, time_s) - 1
        return self.phases[at].name if at >= 0 and self.phases[at].contains(time_s) else None

    @cached_property
    def work(self) -> tuple[Op, ...]:
        """What computes: the device's kernels, or on a CPU the host's operations."""
        return self.kernels or tuple(op for op in self.ops if _computes(op.name))

    def busy_s(self) -> float | None:
        """Return the seconds of an average step at which the device works. None on a CPU.

        Moments at which several streams work count once.
        """
        if not self.kernels:
            return None
        total_s, end_s = 0.0, 0.0
        for op in sorted(self.kernels, key=lambda op: op.start_s):
            total_s += max(op.end_s - max(op.start_s, end_s), 0.0)
            end_s = max(end_s, op.end_s)
        return total_s / self.steps

    def table(self) -> tuple[KernelRow, ...]:
        """Return one row per class of the work, the one with the most time first."""
        by_kind: defaultdict[str, list[Op]] = defaultdict(list)
        for op in self.work:
            by_kind[op.kind].append(op)
        total_s = sum(op.self_s for op in self.work)
        rows = []
        for kind in filter(by_kind.get, KINDS):
            ops = by_kind[kind]
            by_name: defaultdict[str, float] = defaultdict(float)
            for op in ops:
                by_name[op.name] += op.self_s
            seconds = sum(by_name.values())
            outermost = [
                op
                for op in ops
                if not (op.parent and _computes(op.parent) and kind_of(op.parent) == kind)
            ]
            rows.append(
                KernelRow(
                    kind=kind,
                    seconds=seconds / self.steps,
                    share=seconds / total_s if total_s else 0.0,
                    calls=len(outermost) / self.steps,
                    slowest=max(by_name, key=by_name.__getitem__),
                )
            )
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    def counted(self, work_s: float) -> dict[str, float]:
        """Return the operations of an average step, by their names in `Evidence`.

        On a CPU only those count that no other operation called, and tiny ones by their share of
        `work_s`: the seconds of a step that no profiler slows down.
        """
        ops = self.kernels or [
            op
            for op in self.ops
            if op.name.startswith("aten::") and not (op.parent or "").startswith("aten::")
        ]
        tiny = [op.seconds + LAUNCH_S for op in ops if op.seconds < TINY_S]
        tiny_s, total_s = sum(tiny) / self.steps, sum(op.seconds + LAUNCH_S for op in ops)
        if not self.kernels:
            tiny_s = work_s * sum(tiny) / total_s if total_s else 0.0
        number, tiny_number = len(ops) / self.steps, len(tiny) / self.steps
        return {"ops": number, "tiny_ops": tiny_number, "tiny_op_s": tiny_s}


def _computes(name: str) -> bool:
    """Return whether an operation of the host does work, rather than only call others."""
    return ("::" in name or is_generated(name)) and not name.startswith(NOT_WORK)


@contextmanager
def profiling(device: str, **options: Any) -> Iterator[profile]:
    """Record the operations inside the block. `options` are those of `torch.profiler.profile`."""
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True, **options) as profiler:
        yield profiler
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


@contextmanager
def phase_ranges(timer: PhaseTimer) -> Iterator[None]:
    """Make each phase of a timer a range of the trace inside the block.

    The garbage collector is none: it may run where torch must not be called.
    """
    ranges: list[Any] = []

    def change(name: str | None) -> None:
        before(name)
        if name is not None:
            range_of = nullcontext if name == GC else record_function
            ranges.append(range_of(PREFIX + name.removesuffix("_wait")))
            ranges[-1].__enter__()
        elif ranges:
            ranges.pop().__exit__(None, None, None)

    before, timer.on_change = timer.on_change, change
    try:
        yield
    finally:
        timer.on_change = before
        for each in reversed(ranges):
            each.__exit__(None, None, None)


def exported(profiler: profile, path: Path) -> dict[str, Any]:
    """Write the trace of a finished profiler to a file, and return it.

    Raises: RunFailed when it is not complete: the profiler does not report a disk that is full.
    """
    profiler.export_chrome_trace(str(path))
    try:
        # a rate over 0 s is inf there, which is no JSON
        document: dict[str, Any] = json.loads(path.read_bytes(), parse_constant=lambda _: None)
        document["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFailed(
            f"The profiler could not write its trace to {path.parent}.",
            fix="The usual cause is a full disk: free space there, use --out on a different disk, "
            "or profile fewer steps with --steps.",
        ) from error
    return document


@dataclass
class _Node:
    """An operation of the host while the trace is read."""

    event: Event
    place: Range
    parent: _Node | None
    called_s: float = 0.0
    """Seconds of the operations that it calls."""


def read_trace(document: Mapping[str, Any], *, steps: int) -> Trace:
    """Return what a trace contains."""
    events: list[Event] = [one for one in document["traceEvents"] if "ts" in one]
    events.sort(key=lambda one: (float(one["ts"]), -float(one.get("dur", 0.0))))
    marks = [one for one in events if one.get("cat") == "user_annotation"]
    marks = [one for one in marks if str(one["name"]).startswith(PREFIX)]
    origin_us = float((marks or events)[0]["ts"]) if events else 0.0

    def place(event: Event) -> Range:
        start_s = 1e-6 * (float(event["ts"]) - origin_us)
        name = str(event["name"]).removeprefix(PREFIX)
        return Range(name, start_s, start_s + 1e-6 * float(event.get("dur", 0.0)))

    ranges = [place(one) for one in marks]
    trace = Trace(
        ops=(),
        kernels=(),
        steps=steps,
        phases=_in_turns([one for one in ranges if not one.name.startswith(STEP)]),
        step_ranges=tuple(one for one in ranges if one.name.startswith(STEP)),
    )
    nodes = _tree(events, place)
    return replace(
        trace,
        ops=tuple(
            Op(
                name=node.place.name,
                start_s=node.place.start_s,
                seconds=node.place.seconds,
                self_s=max(node.place.seconds - node.called_s, 0.0),
                parent=node.parent.place.name if node.parent else None,
                within=trace.phase_at(node.place.start_s),
            )
            for node in nodes
        ),
        kernels=tuple(_kernels(events, place, nodes, trace)),
    )


def _in_turns(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Divide ranges that nest into ones that follow each other: the innermost counts."""
    found: list[Range] = []
    around: list[Range] = []
    since_s = 0.0

    def cut(at_s: float) -> None:
        nonlocal since_s
        if around and at_s > since_s:
            found.append(Range(around[-1].name, since_s, at_s))
        since_s = at_s

    for each in [*ranges, Range("", math.inf, math.inf)]:
        while around and around[-1].end_s <= each.start_s:
            cut(around[-1].end_s)
            around.pop()
        cut(each.start_s)
        around.append(each)
    return tuple(found)


def _tree(events: Sequence[Event], place: Callable[[Event], Range]) -> list[_Node]:
    """Return the host's operations with their parents. Each thread nests its own."""
    found: list[_Node] = []
    stacks: defaultdict[Any, list[_Node]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "cpu_op":
            continue
        stack, here = stacks[event.get("tid")], place(event)
        while stack and stack[-1].place.end_s <= here.start_s:
            stack.pop()
        node = _Node(event, here, stack[-1] if stack else None)
        if node.parent is not None:
            node.parent.called_s += here.seconds
        stack.append(node)
        found.append(node)
    return found


def _kernels(
    events: Sequence[Event], place: Callable[[Event], Range], nodes: Sequence[_Node], trace: Trace
) -> Iterator[Op]:
    """Yield kernels and copies."""
    by_id = {node.event.get("args", {}).get("External id"): node for node in nodes}
    launches = {
        one.get("args", {}).get("correlation"): one for one in events if one.get("cat") in RUNTIME
    }
    for event in events:
        if event.get("cat") not in DEVICE:
            continue
        known, here = event.get("args", {}), place(event)
        node = by_id.get(known.get("External id"))
        started = launches.get(known.get("correlation")) or (node.event if node else event)
        yield Op(
            name=here.name,
            start_s=here.start_s,
            seconds=here.seconds,
            self_s=here.seconds,
            within=trace.phase_at(place(started).start_s),
            launched_by=node.place.name if node else None,
        )
