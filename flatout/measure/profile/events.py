"""Reads the trace file of torch.profiler: operations, kernels, phases, allocations. No torch calls.

The file is Chrome's JSON, which is public and the same in all versions of torch; shapes, types,
the links from kernels to operations, and addresses of memory are in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from flatout.measure.profile.cost import Call, bytes_of, flops_of
from flatout.measure.profile.report import PHASES
from flatout.measure.steps.kernels import is_generated, kind_of
from flatout.measure.steps.trace import Op, Trace

PREFIX = "flatout."
"""Start of the names of the ranges that mark steps and their phases."""
STEP = "step"
"""The range of a whole step."""
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
CUDA = 1
"""The profiler's number for memory of a GPU; 0 is the host's."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Range:
    """A step, or a phase of one."""

    name: str
    start_s: float
    end_s: float

    def contains(self, time_s: float) -> bool:
        """Return whether a time lies in the range."""
        return self.start_s <= time_s <= self.end_s


@dataclass(frozen=True)
class Allocation:
    """A block that was allocated or freed."""

    time_s: float
    address: int
    bytes: int
    """Negative when it is freed."""
    allocated: int | None
    """Bytes that the allocator had given out by then."""
    reserved: int | None
    """Bytes that the allocator held by then."""


@dataclass(frozen=True)
class Recording:
    """Everything that is read from a trace file, in order of time."""

    trace: Trace
    phases: tuple[Range, ...]
    steps: tuple[Range, ...]
    host_allocations: tuple[Allocation, ...]
    device_allocations: tuple[Allocation, ...]
    origin_us: float
    """The file's time at 0 s."""

    @cached_property
    def _starts(self) -> list[float]:
        return [phase.start_s for phase in self.phases]

    def phase_at(self, time_s: float) -> Range | None:
        """Return the phase at a time; None between phases."""
        at = bisect_right(self._starts, time_s) - 1
        return self.phases[at] if at >= 0 and time_s <= self.phases[at].end_s else None


@dataclass
class _Node:
    """An operation of the host, with those that it calls."""

    event: Event
    parent: _Node | None
    list_item_bytes: int | None
    children: list[_Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.event["name"])

    @cached_property
    def call(self) -> Call:
        known = self.event.get("args", {})
        return Call(
            self.name,
            known.get("Input Dims", ()),
            known.get("Input type", ()),
            known.get("Concrete Inputs", ()),
            self.list_item_bytes,
        )

    @cached_property
    def kind(self) -> str:
        return kind_of(self.name)


def read_events(
    document: Mapping[str, Any], *, wall_s: float, list_item_bytes: int | None = None
) -> Recording:
    """Return what a trace file contains.

    `list_item_bytes` is the size of the elements in lists of tensors, None if unknown.
    """
    events: list[Event] = [one for one in document["traceEvents"] if "ts" in one]
    events.sort(key=lambda one: (float(one["ts"]), -float(one.get("dur", 0.0))))
    marks = [one for one in events if one.get("cat") == "user_annotation"]
    marks = [one for one in marks if str(one["name"]).startswith(PREFIX)]
    origin_us = float((marks or events)[0]["ts"]) if events else 0.0
    ranges = [_range(one, origin_us) for one in marks]
    steps = tuple(one for one in ranges if one.name == STEP)
    phases = [one for one in ranges if one.name in PHASES]
    for at, (one, after) in enumerate(pairwise(phases)):
        if after.name != PHASES[0]:  # phases of a step follow each other
            phases[at] = replace(one, end_s=after.start_s)
    empty = Recording(
        Trace((), (), max(len(steps), 1), wall_s),
        tuple(phases),
        steps,
        _allocations(events, origin_us, on_device=False),
        _allocations(events, origin_us, on_device=True),
        origin_us,
    )
    nodes = _tree(events, list_item_bytes)
    ops = tuple(_host_op(node, empty) for node in nodes)
    kernels = tuple(_device_ops(events, nodes, empty))
    return replace(empty, trace=Trace(ops, kernels, empty.trace.steps, wall_s))


def _span(event: Event, origin_us: float) -> tuple[float, float]:
    """Return start and duration of an event in seconds."""
    return 1e-6 * (float(event["ts"]) - origin_us), 1e-6 * float(event.get("dur", 0.0))


def _range(event: Event, origin_us: float) -> Range:
    start_s, seconds = _span(event, origin_us)
    name = str(event["name"]).removeprefix(PREFIX).partition(" ")[0]
    return Range(name, start_s, start_s + seconds)


def _tree(events: Iterable[Event], list_item_bytes: int | None) -> list[_Node]:
    """Return the host's operations with their parents; each thread nests its own."""
    found: list[_Node] = []
    stacks: defaultdict[Any, list[_Node]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "cpu_op" or event.get("ph") != "X":
            continue
        stack = stacks[event.get("tid")]
        while stack and _end_us(stack[-1].event) <= float(event["ts"]):
            stack.pop()
        node = _Node(event, stack[-1] if stack else None, list_item_bytes)
        if node.parent is not None:
            node.parent.children.append(node)
        stack.append(node)
        found.append(node)
    return found


def _host_op(node: _Node, recording: Recording) -> Op:
    start_s, seconds = _span(node.event, recording.origin_us)
    called_s = sum(_span(child.event, 0.0)[1] for child in node.children)
    phase = recording.phase_at(start_s)
    # what it calls has the same cost: a wrapper adds nothing
    wraps = any(child.kind == node.kind for child in node.children)
    return Op(
        name=node.name,
        start_s=start_s,
        seconds=seconds,
        self_s=max(seconds - called_s, 0.0),
        on_device=False,
        thread=_number(node.event.get("tid")),
        parent=node.parent.name if node.parent else None,
        within=phase.name if phase else None,
        flops=0 if wraps else flops_of(node.call),
        bytes=0 if wraps else bytes_of(node.call),
    )


def _device_ops(
    events: Sequence[Event], nodes: Sequence[_Node], recording: Recording
) -> Iterator[Op]:
    """Yield kernels and copies; the cost of an operation belongs to its first kernel."""
    by_id = {node.event.get("args", {}).get("External id"): node for node in nodes}
    launches = {
        one.get("args", {}).get("correlation"): one for one in events if one.get("cat") in RUNTIME
    }
    counted: set[int] = set()
    for event in events:
        if event.get("cat") not in DEVICE:
            continue
        known = event.get("args", {})
        node = by_id.get(known.get("External id"))
        started = launches.get(known.get("correlation")) or (node.event if node else event)
        phase = recording.phase_at(_span(started, recording.origin_us)[0])
        flops, num_bytes = _device_cost(str(event["name"]), node, known, counted)
        start_s, seconds = _span(event, recording.origin_us)
        yield Op(
            name=str(event["name"]),
            start_s=start_s,
            seconds=seconds,
            self_s=seconds,
            on_device=True,
            thread=_number(known.get("stream", event.get("tid"))),
            parent=None,
            within=phase.name if phase else None,
            flops=flops,
            bytes=num_bytes,
            launched_by=node.name if node else None,
        )


def _device_cost(
    name: str, node: _Node | None, known: Mapping[str, Any], counted: set[int]
) -> tuple[int | None, int | None]:
    """Return FLOPs and bytes of a kernel; 0 when an earlier kernel of its operation has them."""
    if "bytes" in known:  # a copy
        return None, int(known["bytes"])
    if node is None:
        return None, None
    if not is_generated(name):
        node = next((one for one in _upwards(node) if flops_of(one.call) is not None), node)
    if id(node) in counted:
        return 0, 0
    counted.add(id(node))
    return flops_of(node.call), bytes_of(node.call)


def _upwards(node: _Node | None) -> Iterator[_Node]:
    while node is not None:
        yield node
        node = node.parent


def _allocations(
    events: Iterable[Event], origin_us: float, *, on_device: bool
) -> tuple[Allocation, ...]:
    found = []
    for event in events:
        known = event.get("args", {})
        if event.get("name") != "[memory]" or (known["Device Type"] == CUDA) != on_device:
            continue
        found.append(
            Allocation(
                _span(event, origin_us)[0],
                int(known["Addr"]),
                int(known["Bytes"]),
                known.get("Total Allocated"),
                known.get("Total Reserved"),
            )
        )
    return tuple(found)


def _end_us(event: Event) -> float:
    return float(event["ts"]) + float(event.get("dur", 0.0))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
