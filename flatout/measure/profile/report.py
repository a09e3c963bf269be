"""What a profile found: its figures, as written to profile.json, and their text. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import TextWrapper

from flatout.measure.profile.events import PHASES
from flatout.measure.profile.memory import MemoryPeak
from flatout.measure.profile.table import Gap, ProfileRoof, TableRow
from flatout.measure.steps.evidence import Fact

FORMAT_VERSION = 1
COLUMNS = 80
LETTERS = dict(zip(PHASES, "dFBOl", strict=True))
"""How the timeline draws each phase."""
IDLE = "."
MAX_NAME = 36
LABEL = 8
"""Width of the names of the lanes."""


class Segment(Fact):
    """A part of the timeline of one step."""

    lane: str
    """host or device."""
    phase: str
    """data, forward, backward, optimizer or logging."""
    start_s: float
    """From the start of the step."""
    seconds: float
    """Duration."""


class Timeline(Fact):
    """One profiled step: the one whose duration is the median."""

    step: int
    """Its number in the run."""
    seconds: float
    """Its duration under the profiler."""
    segments: tuple[Segment, ...]
    """What host and device do; the device idles in between."""
    gaps: tuple[Gap, ...] | None
    """The longest times at which the device idles; null without a GPU."""
    device_idle: float | None
    """Share of the step at which the device idles; null without a GPU."""
    memory: tuple[tuple[float, float], ...]
    """(seconds from the start of the step, GiB)."""


class Profile(Fact):
    """A profile, as written to profile.json."""

    format_version: int = FORMAT_VERSION
    """Version of the format."""
    recipe: str
    """Its name."""
    device: str
    """cpu, cuda or cuda:N."""
    arithmetic: str
    """Arithmetic of the matrix products."""
    speedups: tuple[str, ...]
    """Speedups that are on."""
    environment: Mapping[str, str | int]
    """Device, processor, threads, torch."""
    first_step: int
    """The first profiled step."""
    steps: int
    """Profiled steps."""
    step_s: float | None
    """Seconds of an average step without the profiler; null: not measured."""
    profiled_step_s: float
    """Seconds of an average step under the profiler."""
    phases_s: Mapping[str, float] | None
    """Seconds of the host by phase in an average step without the profiler."""
    table: tuple[TableRow, ...] | None
    """Kernels by class; null: the profiler could not see them."""
    outside_s: float | None
    """Seconds of an average profiled step outside of kernels: a GPU idles, a CPU runs Python."""
    roof: ProfileRoof
    """What the device can do at most."""
    timeline: Timeline | None
    """One step; null without a profiler."""
    memory: MemoryPeak | None
    """The peak; null: not measured."""
    has_snapshot: bool
    """Whether torch's memory snapshot was written."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""


def text_of(profile: Profile) -> str:
    """Return the whole profile as text in 80 columns."""
    parts = [_steps(profile)]
    if profile.timeline is not None:
        parts.append(_timeline(profile.timeline))
    if profile.table is not None:
        parts.append(_table(profile.table, profile))
    if profile.memory is not None:
        parts.append(_memory(profile.memory))
    if profile.notes:
        parts.append("\n".join(profile.notes))
    lines = "\n\n".join(parts).splitlines()
    wrapper = TextWrapper(
        COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) if len(line) > COLUMNS else line for line in lines)


def clipped(name: str) -> str:
    """Return a name that is not too long for a line: templates of kernels can be."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."


def _steps(profile: Profile) -> str:
    last = profile.first_step + profile.steps - 1
    numbers = f"step {last}" if profile.steps == 1 else f"steps {profile.first_step} to {last}"
    lines = [f"{profile.recipe} on {profile.device}, {profile.arithmetic}, {numbers}"]
    slow = f"{_ms(profile.profiled_step_s)} under the profiler"
    lines.append(
        f"{_ms(profile.step_s)} per step, {slow}" if profile.step_s else f"{slow} per step"
    )
    if profile.phases_s and profile.step_s:
        shares = [
            f"{name} {profile.phases_s[name] / profile.step_s:.0%}"
            for name in PHASES
            if name in profile.phases_s
        ]
        lines.append("Host: " + ", ".join(shares))
    return "\n".join(lines)


def _timeline(timeline: Timeline) -> str:
    """Return host, device and memory of one step above each other."""
    width = COLUMNS - LABEL
    lanes = [
        (name, _lane([one for one in timeline.segments if one.lane == name], timeline, width))
        for name in dict.fromkeys(one.lane for one in timeline.segments)
    ]
    if timeline.memory:
        lanes.append(("memory", _digits(timeline, width)))
    scale = f"{'0 ms':<{width // 2}}{_ms(timeline.seconds):>{width - width // 2}}"
    legend = [f"{letter} {name}" for name, letter in LETTERS.items()]
    known = [name for name, _ in lanes]
    legend += [f"{IDLE} idle"] if "device" in known else []
    legend += ["0-9 share of peak"] if "memory" in known else []
    lines = [f"Step {timeline.step}", f"{'':<{LABEL}}{scale}"]
    lines += [f"{name:<{LABEL}}{drawn}" for name, drawn in lanes]
    lines.append(", ".join(legend))
    if timeline.device_idle is not None:
        lines.append(f"The device idles {timeline.device_idle:.0%} of the step.")
    lines += [_gap(gap) for gap in timeline.gaps or ()]
    return "\n".join(lines)


def _lane(segments: Sequence[Segment], timeline: Timeline, width: int) -> str:
    """Return one character per slice of the step: the phase with the most time in it."""
    slice_s = timeline.seconds / width or 1.0
    drawn = []
    for column in range(width):
        start_s, end_s = column * slice_s, (column + 1) * slice_s
        inside = dict.fromkeys(PHASES, 0.0)
        for one in segments:
            inside[one.phase] += max(
                min(one.start_s + one.seconds, end_s) - max(one.start_s, start_s), 0.0
            )
        name, seconds = max(inside.items(), key=lambda phase: phase[1])
        drawn.append(LETTERS[name] if seconds > slice_s - sum(inside.values()) else IDLE)
    return "".join(drawn)


def _digits(timeline: Timeline, width: int) -> str:
    """Return the most memory in each slice of the step, in tenths of the peak."""
    peak = max(gib for _, gib in timeline.memory) or 1.0
    slice_s = timeline.seconds / width or 1.0
    drawn, at, now = [], 0, timeline.memory[0][1]
    for column in range(width):
        most = now
        while at < len(timeline.memory) and timeline.memory[at][0] <= (column + 1) * slice_s:
            now = timeline.memory[at][1]
            most = max(most, now)
            at += 1
        drawn.append(str(min(int(10 * most / peak), 9)))
    return "".join(drawn)


def _gap(gap: Gap) -> str:
    doing = f"the host is in {clipped(gap.host_op)}" if gap.host_op else "the host runs Python"
    phase = f" ({gap.phase})" if gap.phase else ""
    return f"  {_ms(gap.seconds)} idle at {_ms(gap.start_s)}: {doing}{phase}"


def _table(rows: Sequence[TableRow], profile: Profile) -> str:
    roof = profile.roof
    lines = ["class           ms/step  share   calls   TFLOP/s  of peak     GB/s  of peak"]
    lines += [
        f"{row.kind:<14}{1e3 * row.seconds:>9.3g}{row.share:>7.0%}{row.calls:>8,.0f}"
        f"{_figure(row.tflops):>10}{_percent(row.of_peak):>9}"
        f"{_figure(row.gb_per_s):>9}{_percent(row.of_bandwidth):>9}"
        for row in rows
    ]
    if profile.outside_s is not None:
        where = "the device idles" if profile.device != "cpu" else "Python and autograd"
        share = profile.outside_s / profile.profiled_step_s
        lines.append(f"outside of them {_ms(profile.outside_s)} per step, {share:.0%}: {where}")
    if roof.peak_tflops is not None:
        lines.append(f"peak: {roof.peak_tflops:.3g} TFLOP/s ({roof.peak_source})")
    else:
        lines.append("peak of matrix products: unknown")
    if roof.gb_per_s is not None:
        lines.append(f"      {roof.gb_per_s:.3g} GB/s ({roof.bandwidth_source})")
    else:
        lines.append("memory bandwidth: unknown")
    if any((row.of_bandwidth or 0.0) > 1.0 for row in rows):
        lines.append("      more than 100%: the data came from caches")
    return "\n".join(lines)


def _memory(peak: MemoryPeak) -> str:
    when = []
    if peak.share_of_step is not None:
        when = [f"{peak.share_of_step:.0%} into step {peak.step}"]
    when += [f"in {peak.phase}"] if peak.phase else []
    lines = [f"Peak of tensors: {_size(peak.gib)}" + (f", {', '.join(when)}" if when else "")]
    lines += [
        f"  {name:<12}{_size(gib):>10}{gib / peak.gib:>6.0%}"
        for name, gib in peak.parts_gib.items()
    ]
    if peak.reserved_gib is not None:
        lines.append(f"  The allocator held at most {_size(peak.reserved_gib)}.")
    return "\n".join(lines)


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.0995 else f"{1e3 * seconds:.3g} ms"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
