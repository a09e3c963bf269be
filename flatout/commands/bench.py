"""Measure what each speedup gains on this machine, or what a setting costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from flatout.cache import default_cache
from flatout.commands import Command, Option, Overrides, RecipeName, train
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.json_io import JsonObject, Result
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local

SWEEPS = "batch, seq_len, precision, accumulation or prefetch"


class BenchResult(Result):
    """The measured rates and gains."""

    path: str
    """The directory with bench.json (all figures of all trials), table.md and bench.svg."""
    kind: str
    """ladder, or the setting that was swept."""
    rungs: list[JsonObject]
    """One object per line of the table.

    It has name, status, reason, tokens_per_s and gain with their intervals, the promise, the parts
    of a step, and peak_gib."""
    total_speedup: float | None
    """Speed of the full set relative to the baseline.

    null in a sweep, or when one of the two has no figures."""
    total_speedup_low: float | None
    """Lower end of its 94% interval; null with too few repeats."""
    total_speedup_high: float | None
    """Upper end."""
    repeats: int
    """Rounds that were started."""
    complete: bool
    """False after an interruption."""
    ended_by_signal: int | None
    """The signal that interrupted it: 2 for Ctrl+C, 15 for SIGTERM; null for none."""
    wall_s: float
    """Seconds in total."""

    def summary(self) -> str:
        """Return the bars, and the paths of the files."""
        from flatout.figures import duration
        from flatout.measure.bench.table import bars
        from flatout.measure.trials.results import read

        shown = bars(read(Path(self.path)), encoding=sys.stdout.encoding or "ascii")
        files = "table.md, bench.svg, bench.json, trials.jsonl"
        return f"{shown}\n\n{self.path}/  {files}; {duration(self.wall_s)}"

    @property
    def exit_code(self) -> int:
        """130 or 143 after an interruption, even though there are results."""
        return 0 if self.ended_by_signal is None else 128 + self.ended_by_signal


def bench(
    recipe: RecipeName,
    overrides: Overrides = None,
    minutes: Annotated[
        float | None,
        Option("Time limit: trials become shorter and repeats fewer to stay within it.", min=0.1),
    ] = None,
    repeats: Annotated[int | None, Option("Maximum number of rounds; 5 by default.", min=1)] = None,
    sweep: Annotated[str | None, Option(f"Sweep {SWEEPS} instead.")] = None,
    out: Annotated[
        Path | str | None, Option("Directory for the results; bench/RECIPE-DIGEST by default.")
    ] = None,
    *,
    progress: Progress = SILENT,
) -> BenchResult:
    """Measure what each speedup gains on this machine, or what a setting costs.

    The ladder starts at the baseline, without speedups, and adds one speedup at a time, up to the
    set that `train` would use; then it leaves each one out of that set, and adds each one that is
    off. speedups=... chooses the full set. Every trial runs in its own process, and repeats are
    interleaved. Ctrl+C stops measuring and shows the results so far. Each trial is written to
    trials.jsonl as soon as it ends. The measured gains are kept for `flatout list speedups`.

    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    from flatout.measure.bench.bench import run_bench

    require_local(out or "", "--out ")
    report, results = run_bench(
        load_config(recipe, overrides or ()),
        minutes=minutes,
        repeats=repeats,
        sweep=sweep,
        out=None if out is None else Path(out),
        cache=default_cache(),
        progress=progress,
    )
    total = report.total_speedup
    return BenchResult(
        path=str(results),
        kind=report.kind,
        rungs=[row.model_dump(mode="json") for row in report.rows],
        total_speedup=total.median if total else None,
        total_speedup_low=total.low if total else None,
        total_speedup_high=total.high if total else None,
        repeats=report.repeats,
        complete=report.complete,
        ended_by_signal=report.ended_by_signal,
        wall_s=report.wall_s,
    )


def check(
    recipe: str,
    overrides: list[str] | None,
    sweep: str | None,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> None:
    """Check the command line as far as that is possible without torch; remote data is fetched.

    Raises: UsageError.
    """
    if sweep is not None and sweep.startswith("-"):
        raise ConfigError(
            f"--sweep needs one of {SWEEPS}; {sweep} is another option.",
            fix="For example --sweep batch.",
        )
    require_local(out or "", "--out ")
    train.check(recipe, overrides, progress=progress)


COMMAND = Command(
    bench,
    example="flatout bench shakespeare-char data.path=data/s --minutes 6",
    check=check,
    needs_torch=True,
    writes_files=True,
)
