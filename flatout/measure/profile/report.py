"""What a profile found: its numbers, as `--json` and profile.json have them, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import TextWrapper

from flatout.display import milliseconds
from flatout.measure.steps.evidence import KernelRow
from flatout.storage.files import Stored
from flatout.storage.json_io import Result

FORMAT_VERSION = 3
PHASES = ("data", "forward", "backward", "optimizer", "logging")
"""The phases of a step."""
COLUMNS = 80
MAX_NAME = 36


class Gap(Stored):
    """A time at which the device waits for the host."""

    start_s: float
    """From the start of the step."""
    seconds: float
    phase: str | None
    """What the host did: data, forward, ..."""
    host_op: str | None
    """The host's outermost operation then. Null means Python."""


class Profile(Result):
    """Where the time of the profiled steps went."""

    format_version: int = FORMAT_VERSION
    """Version of the format."""
    path: str
    """The directory with trace.json.gz, profile.json and profile.txt."""
    trace: str | None
    """The trace: open it at https://ui.perfetto.dev. Null means the profiler could not be used."""
    snapshot: str | None
    """torch's memory snapshot, for https://pytorch.org/memory_viz. Null on a CPU."""
    recipe: str
    """Its name."""
    device: str
    """cpu, cuda or cuda:N."""
    arithmetic: str
    """Arithmetic of the matmuls."""
    speedups: tuple[str, ...]
    """Speedups that are on."""
    environment: Mapping[str, str | int]
    """Device, processor, threads, torch."""
    first_step: int
    """The first profiled step."""
    steps: int
    """Profiled steps."""
    step_ms: float | None
    """An average step without the profiler. Null if not measured."""
    profiled_step_ms: float
    """An average step under the profiler."""
    phases_ms: Mapping[str, float] | None
    """The host's time by phase in an average step without the profiler. Null if not measured."""
    table: tuple[KernelRow, ...] | None = None
    """Kernels by class. Null means the profiler could not see them."""
    outside_ms: float | None = None
    """Time of an average profiled step outside of kernels: a GPU idles, a CPU runs Python."""
    gaps: tuple[Gap, ...] | None = None
    """The longest times of one step at which the device idles. Null without a GPU."""
    device_idle: float | None = None
    """Share of that step at which the device idles. Null without a GPU."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""

    def summary(self) -> str:
        """Return the profile as text, and the paths of the files."""
        files = [self.trace, self.snapshot, "profile.json", "profile.txt"]
        names = ", ".join(Path(one).name for one in files if one)
        hint = "\nOpen the trace at https://ui.perfetto.dev" if self.trace else ""
        return f"{self.text()}\n\n{self.path}/  {names}{hint}"

    def text(self) -> str:
        """Return the whole profile as text in 80 columns."""
        parts = [self._steps()]
        if self.device_idle is not None:
            idle = [f"The device idles {self.device_idle:.0%} of a step."]
            parts.append("\n".join([*idle, *map(_gap, self.gaps or ())]))
        if self.table is not None:
            parts.append(self._table(self.table))
        if self.notes:
            parts.append("\n".join(self.notes))
        lines = "\n\n".join(parts).splitlines()
        wrapper = TextWrapper(
            COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        return "\n".join(wrapper.fill(line) if len(line) > COLUMNS else line for line in lines)

    def _steps(self) -> str:
        last = self.first_step + self.steps - 1
        numbers = f"step {last}" if self.steps == 1 else f"steps {self.first_step} to {last}"
        slow = f"{milliseconds(self.profiled_step_ms / 1e3)} under the profiler"
        lines = [
            f"{self.recipe} on {self.device}, {self.arithmetic}, {numbers}",
            f"{milliseconds(self.step_ms / 1e3)} per step, {slow}"
            if self.step_ms
            else f"{slow} per step",
        ]
        if self.phases_ms and self.step_ms:
            shares = {name: self.phases_ms.get(name) for name in PHASES}
            known = [f"{name} {ms / self.step_ms:.0%}" for name, ms in shares.items() if ms]
            rest = 1 - sum(self.phases_ms.values()) / self.step_ms
            if self.device != "cpu" and rest > 0:
                known.append(f"waiting for the device and others {rest:.0%}")
            lines.append("Host: " + ", ".join(known))
        return "\n".join(lines)

    def _table(self, rows: tuple[KernelRow, ...]) -> str:
        lines = ["class           ms/step  share   calls"]
        lines += [
            f"{row.kind:<14}{1e3 * row.seconds:>9.3g}{row.share:>7.0%}{row.calls:>8,.0f}"
            for row in rows
        ]
        if self.outside_ms is not None:
            where = "the device idles" if self.device != "cpu" else "Python and autograd"
            share = self.outside_ms / self.profiled_step_ms
            outside = milliseconds(self.outside_ms / 1e3)
            lines.append(f"outside of them {outside} per step, {share:.0%}: {where}")
        return "\n".join(lines)


def clipped(name: str) -> str:
    """Return a name that is not too long for a line: templates of kernels can be."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."


def _gap(gap: Gap) -> str:
    doing = f"the host is in {clipped(gap.host_op)}" if gap.host_op else "the host runs Python"
    phase = f" ({gap.phase})" if gap.phase else ""
    return f"  {milliseconds(gap.seconds)} idle at {milliseconds(gap.start_s)}: {doing}{phase}"
