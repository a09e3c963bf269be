"""Profile some steps of a recipe: a trace for Perfetto, kernels by class, memory at its peak."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.cache import default_cache
from flatout.commands import Command, Option, Overrides, RecipeName, Result, train
from flatout.config.schema import load_config
from flatout.errors import UsageError
from flatout.json_io import JsonObject
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local

MOST_STEPS = 100
"""The profiler keeps every operation of every step in memory."""


class ProfileResult(Result):
    """Where the time and the memory of the profiled steps went."""

    path: str
    """The directory with trace.json.gz, profile.json and profile.txt."""
    trace: str | None
    """The trace: open it at https://ui.perfetto.dev. null: the profiler could not be used."""
    snapshot: str | None
    """torch's memory snapshot, for https://pytorch.org/memory_viz; null on a CPU."""
    first_step: int
    """The first profiled step."""
    steps: int
    """Profiled steps."""
    step_ms: float | None
    """An average step without the profiler; null: not measured."""
    profiled_step_ms: float
    """An average step under the profiler."""
    phases_ms: dict[str, float] | None
    """The host's time by phase in an average step without the profiler; null: not measured."""
    table: list[JsonObject] | None
    """One object per class of kernels.

    It has kind, seconds (per step), share, calls, tflops, of_peak, gb_per_s, of_bandwidth and the
    slowest name; what is unknown is null. null: the profiler could not see the kernels."""
    outside_ms: float | None
    """Time of an average profiled step outside of kernels."""
    roof: JsonObject
    """What this device can do at most, and the source of each figure."""
    timeline: JsonObject | None
    """One step: what host and device do, when the device idles, memory."""
    memory: JsonObject | None
    """The peak and its parts by category."""
    notes: list[str]
    """What could not be measured, and why."""

    def summary(self) -> str:
        """Return the profile as text, and the paths of the files."""
        names = ["profile.json", "profile.txt"]
        names = [Path(one).name for one in (self.trace, self.snapshot) if one] + names
        text = (Path(self.path) / "profile.txt").read_text(encoding="utf-8")
        hint = "\nOpen the trace at https://ui.perfetto.dev" if self.trace else ""
        return f"{text}\n{self.path}/  {', '.join(names)}{hint}"


def profile(
    recipe: RecipeName,
    overrides: Overrides = None,
    steps: Annotated[int, Option("Steps to profile.", min=1)] = 3,
    skip: Annotated[
        int | None,
        Option("Steps before them; by default until the step time is steady.", min=0),
    ] = None,
    out: Annotated[
        Path | str | None, Option("Directory for the files; profile/RECIPE-DIGEST by default.")
    ] = None,
    *,
    progress: Progress = SILENT,
) -> ProfileResult:
    """Show where the time and the memory of a few training steps go.

    The steps are those of training, after warm-up and compilation, without evaluations and saves.
    The trace opens in Perfetto; the table shows kernels by class with their share, TFLOP/s and GB/s
    against what this machine can do; memory is told apart at its peak. Nothing is saved but the
    profile.

    Raises: UsageError before anything is measured; OutOfMemory; RunFailed when the disk is full.
    """
    from flatout.measure.profile.profile import SNAPSHOT, run_profile
    from flatout.measure.profile.results import TRACE
    from flatout.measure.profile.run import Wanted

    _check_steps(steps)
    require_local(out or "", "--out ")
    found, folder = run_profile(
        load_config(recipe, overrides or ()),
        wanted=Wanted(steps, skip),
        out=None if out is None else Path(out),
        cache=default_cache(),
        progress=progress,
    )
    fields = found.model_dump(mode="json")
    return ProfileResult(
        path=str(folder),
        trace=str(folder / TRACE) if found.timeline else None,
        snapshot=str(folder / SNAPSHOT) if found.has_snapshot else None,
        first_step=found.first_step,
        steps=found.steps,
        step_ms=None if found.step_s is None else 1e3 * found.step_s,
        profiled_step_ms=1e3 * found.profiled_step_s,
        phases_ms=found.phases_s and {name: 1e3 * s for name, s in found.phases_s.items()},
        outside_ms=None if found.outside_s is None else 1e3 * found.outside_s,
        **{name: fields[name] for name in ("table", "roof", "timeline", "memory", "notes")},
    )


def check(
    recipe: str,
    overrides: list[str] | None,
    steps: int = 3,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> None:
    """Check the command line as far as that is possible without torch; remote data is fetched.

    Raises: UsageError.
    """
    _check_steps(steps)
    require_local(out or "", "--out ")
    train.check(recipe, overrides, progress=progress)


def _check_steps(steps: int) -> None:
    if steps > MOST_STEPS:
        raise UsageError(
            f"--steps {steps}: the operations of that many steps may not fit in memory.",
            fix=f"Profile at most {MOST_STEPS} steps; a few show the same.",
        )


COMMAND = Command(
    profile,
    example="flatout profile shakespeare-char data.path=data/s --steps 5",
    check=check,
    needs_torch=True,
    writes_files=True,
)
