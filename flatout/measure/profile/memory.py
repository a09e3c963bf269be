"""Attributes the memory of steps at each moment: weights, gradients, optimizer, activations, ...

Every allocation during the profiled steps is one block. What it is follows from its address, if the
run names it (weights, optimizer states, gradients, inputs), or else from its life: memory from a
forward pass that lives beyond it is an activation, everything else is temporary. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flatout.measure.profile.events import Allocation, Recording
from flatout.measure.profile.report import MemoryPeak

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
    inputs: Sequence[Blocks] = ()
    """At each forward pass."""


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
    bytes: int
    phase: int | None
    """Number of the phase in which it was allocated; None between phases."""
    category: str | None = None
    end_phase: int | None = None
    freed: bool = False


@dataclass
class _Sweep:
    """A pass over the allocations that finds out what each block is."""

    recording: Recording
    named: Named
    blocks: list[_Block] = field(default_factory=list)
    changes: list[tuple[float, _Block, int]] = field(default_factory=list)
    """(time, block, change in bytes)."""
    live: dict[int, _Block] = field(default_factory=dict)

    def run(self, allocations: Sequence[Allocation]) -> None:
        """Follow all blocks, and name them."""
        phases = self.recording.phases
        kept = {
            "backward": ("inputs", iter(self.named.inputs)),
            "optimizer": ("gradients", iter(self.named.gradients)),
        }
        for category, known in self.named.before.items():
            for address, size in known.items():
                self.live[address] = _Block(size, None, category)
        at = 0
        current: int | None = None
        for one in allocations:
            while at < len(phases) and phases[at].start_s <= one.time_s:
                if phases[at].name in kept:
                    category, blocks = kept[phases[at].name]
                    self._name(next(blocks, {}), category)
                current = at
                at += 1
            inside = current is not None and one.time_s <= phases[current].end_s
            self._follow(one, current if inside else None)
        for category, known in self.named.after.items():
            self._name(known, category)

    def _name(self, known: Blocks, category: str) -> None:
        for address in known:
            block = self.live.get(address)
            if block is not None and block.category is None:
                block.category = category

    def _follow(self, one: Allocation, phase: int | None) -> None:
        if one.bytes > 0:
            block = _Block(one.bytes, phase)
            self.live[one.address] = block
            self.blocks.append(block)
            self.changes.append((one.time_s, block, one.bytes))
            return
        known = self.live.pop(one.address, None)
        freed = known or _Block(-one.bytes, None, "other")
        freed.freed, freed.end_phase = True, phase
        self.changes.append((one.time_s, freed, one.bytes))

    def category(self, block: _Block) -> str:
        """Return what a block is, once it has been followed to its end."""
        if block.category is not None:
            return block.category
        if block.phase is None:
            return "temporary"
        phases = self.recording.phases
        name = phases[block.phase].name
        if name == "data":
            return "inputs"
        outlives = block.end_phase != block.phase
        # what is never freed is no activation, but the loss, which waits to be logged
        return "activations" if name == "forward" and outlives and block.freed else "temporary"


def timeline(recording: Recording, named: Named, *, on_cpu: bool) -> tuple[Moment, ...]:
    """Return the memory of the training device after each change, by category.

    It starts with what there was before.
    """
    allocations = recording.host_allocations if on_cpu else recording.device_allocations
    sweep = _Sweep(recording, named)
    sweep.run(allocations)
    now = Counter({name: sum(known.values()) for name, known in named.before.items()})
    if allocations and allocations[0].allocated:
        unnamed = allocations[0].allocated - allocations[0].bytes - sum(now.values())
        now["other"] += max(unnamed, 0)
    moments = [Moment(0.0, dict(now))]
    for time_s, block, change in sweep.changes:
        category = sweep.category(block)
        now[category] = max(now[category] + change, 0)
        moments.append(Moment(time_s, dict(now)))
    return tuple(moments)


def peak_of(moments: Sequence[Moment], recording: Recording, first: int) -> MemoryPeak | None:
    """Return the moment with the most memory; None when nothing was allocated.

    `first` is the number of the first profiled step.
    """
    if not moments:
        return None
    top = max(moments, key=lambda moment: moment.total)
    phase = recording.phase_at(top.time_s)
    during = [one for one in enumerate(recording.steps, first) if one[1].contains(top.time_s)]
    number, step = during[0] if during else (None, None)
    share = (top.time_s - step.start_s) / ((step.end_s - step.start_s) or 1.0) if step else None
    parts = sorted(top.bytes.items(), key=lambda part: -part[1])
    reserved = [one.reserved for one in recording.device_allocations if one.reserved]
    return MemoryPeak(
        gib=top.total / GIB,
        parts_gib={name: size / GIB for name, size in parts if size},
        phase=phase.name if phase else None,
        step=number,
        share_of_step=share,
        reserved_gib=max(reserved) / GIB if reserved else None,
    )
