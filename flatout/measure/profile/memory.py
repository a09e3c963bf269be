"""Attributes the memory of steps at each moment: weights, gradients, optimizer, activations, ...

Every allocation during the profiled steps is one block. What it is follows from its address, if the
run names it (weights, optimizer states, gradients), or else from its life: memory from a forward
pass that lives beyond it is an activation, that from preparing a batch is an input, everything else
is temporary. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.measure.profile.report import MemoryPeak
from flatout.measure.steps.trace import Trace

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporary",
    "other",
)
"""What memory is used for. `other` was allocated before the steps and has no name."""
GIB = 2**30

Blocks = Mapping[int, int]
"""Bytes by address."""


@dataclass(frozen=True)
class Named:
    """The memory that the run itself can name."""

    before: Mapping[str, Blocks]
    """By category, at the start of the profiled steps: weights, optimizer, gradients."""
    after: Mapping[str, Blocks]
    """By category, at their end."""
    gradients: Sequence[Blocks] = ()
    """At the end of each step's backward passes."""


@dataclass(frozen=True)
class Moment:
    """The memory at one moment."""

    time_s: float
    bytes: Mapping[str, int]
    """By category."""

    @property
    def total(self) -> int:
        """All categories together."""
        return sum(self.bytes.values())


@dataclass
class _Block:
    category: str | None = None
    phase: int | None = None
    """Number of the phase in which it was allocated. None between phases."""
    end_phase: int | None = None
    freed: bool = False


def timeline(trace: Trace, named: Named) -> tuple[Moment, ...]:
    """Return the memory of the training device after each change, by category.

    It starts with what there was before.
    """
    live = {at: _Block(name) for name, known in named.before.items() for at in known}
    changes: list[tuple[float, _Block, int]] = []
    gradients, started = iter(named.gradients), 0

    def name(known: Blocks, category: str) -> None:
        for address in known.keys() & live.keys():
            live[address].category = live[address].category or category

    for one in trace.allocations:
        while started < len(trace.phases) and trace.phases[started].start_s <= one.time_s:
            if trace.phases[started].name == "optimizer":
                name(next(gradients, {}), "gradients")
            started += 1
        phase = started - 1 if trace.phase_at(one.time_s) else None
        if one.bytes > 0:
            block = live[one.address] = _Block(phase=phase)
        else:
            block = live.pop(one.address) if one.address in live else _Block("other")
            block.freed, block.end_phase = True, phase
        changes.append((one.time_s, block, one.bytes))
    for category, known in named.after.items():
        name(known, category)

    now = Counter({name: sum(known.values()) for name, known in named.before.items()})
    if changes and trace.allocations[0].allocated:
        first = trace.allocations[0]
        now["other"] += max((first.allocated or 0) - first.bytes - sum(now.values()), 0)
    moments = [Moment(0.0, dict(now))]
    for time_s, block, change in changes:
        category = block.category or _of_life(block, trace)
        now[category] = max(now[category] + change, 0)
        moments.append(Moment(time_s, dict(now)))
    return tuple(moments)


def _of_life(block: _Block, trace: Trace) -> str:
    """Return what a block without a name is, once it has been followed to its end."""
    phase = None if block.phase is None else trace.phases[block.phase].name
    outlives = block.end_phase != block.phase
    if phase == "data" or (phase == "compute" and outlives):  # a batch, or what is made of it
        return "inputs"
    # what is never freed is no activation, but the loss, which waits to be logged
    return "activations" if phase == "forward" and outlives and block.freed else "temporary"


def peak_of(moments: Sequence[Moment], trace: Trace, first: int) -> MemoryPeak | None:
    """Return the moment with the most memory. None when nothing was allocated.

    `first` is the number of the first profiled step.
    """
    if not moments:
        return None
    top = max(moments, key=lambda moment: moment.total)
    during = [one for one in enumerate(trace.step_ranges, first) if one[1].contains(top.time_s)]
    number, step = during[0] if during else (None, None)
    parts = sorted(top.bytes.items(), key=lambda part: -part[1])
    reserved = [one.reserved for one in trace.allocations if one.reserved]
    return MemoryPeak(
        gib=top.total / GIB,
        parts_gib={name: size / GIB for name, size in parts if size},
        phase=trace.phase_at(top.time_s),
        step=number,
        share_of_step=(top.time_s - step.start_s) / (step.seconds or 1.0) if step else None,
        reserved_gib=max(reserved) / GIB if reserved else None,
    )
