"""What a profile found: its numbers, as `--json` and profile.json have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from flatout.display import Display, Show, displayed, milliseconds, table_of
from flatout.measure.evidence import KernelRow
from flatout.storage.json_io import Result

FORMAT_VERSION = 5


def _step(profile: Profile) -> str:
    slow = f"{milliseconds(profile.profiled_step_ms / 1e3)} under the profiler"
    return f"{milliseconds(profile.step_ms / 1e3)}, {slow}" if profile.step_ms else slow


def _outside(profile: Profile) -> str:
    if profile.outside_ms is None:
        return ""
    where = "the device idles" if profile.device != "cpu" else "Python and autograd"
    share = profile.outside_ms / profile.profiled_step_ms
    return f"{milliseconds(profile.outside_ms / 1e3)}, {share:.0%} of a step: {where}"


class Profile(Result):
    """Where the time of the profiled steps went."""

    format_version: int = FORMAT_VERSION
    """Version of the format."""
    path: str
    """The directory with trace.json.gz and profile.json."""
    trace: str | None
    """The trace: open it at https://ui.perfetto.dev. Null means the profiler could not be used."""
    snapshot: str | None
    """torch's memory snapshot, for https://pytorch.org/memory_viz. Null on a CPU."""
    recipe: str
    """Its name, or the command of a script."""
    device: str
    """cpu, cuda or cuda:N."""
    environment: Mapping[str, str | int]
    """Device, processor, threads, torch."""
    first_step: int
    """The first profiled step."""
    steps: int
    """Profiled steps."""
    step_ms: float | None
    """An average step without the profiler. Null if not measured."""
    profiled_step_ms: Annotated[float, Show("Step", record=_step)]
    """An average step under the profiler."""
    outside_ms: Annotated[float | None, Show("No kernel", record=_outside)] = None
    """Time of an average profiled step outside of kernels: a GPU idles, a CPU runs Python."""
    table: tuple[KernelRow, ...] | None = None
    """Kernels by class. Null means the profiler could not see them."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""

    @property
    def headline(self) -> str:
        """What was profiled."""
        last = self.first_step + self.steps - 1
        numbers = f"step {last}" if self.steps == 1 else f"steps {self.first_step} to {last}"
        return f"{self.recipe} on {self.device}, {numbers}"

    def display(self) -> Display:
        """Return its times, the table of classes, and its files."""
        shown = displayed(self)
        names = filter(None, (self.trace, self.snapshot, "profile.json"))
        files = f"{self.path}/  {', '.join(Path(name).name for name in names)}"
        hint = ["Open the trace at https://ui.perfetto.dev"] if self.trace else []
        tables = [table_of(self.table, "Kernels of a step")] if self.table else []
        return replace(shown, tables=tables, notes=[*self.notes, files, *hint])
