"""Measure what each optimisation gains on this machine, or what a size costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.cache import CACHE
from flatout.commands import Command, Result, train
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local

if TYPE_CHECKING:
    from flatout.measure.statistics import Figure

SWEEPS = "batch, seq_len, precision, accumulation or prefetch"


class BenchResult(Result):
    """What was measured."""

    path: str
    """The folder with bench.json (every figure of every trial), table.md and bench.svg."""
    kind: str
    """ladder, or what was swept."""
    rungs: list[dict[str, Any]]
    """One object a line of the table: name, status, reason, tokens_per_s and gain with their
    intervals, the promise, a step's parts, peak_gib.
    """
    total_speedup: float | None
    """How many times as fast as the baseline the full set is; null in a sweep, or when one of the
    two gave no figures.
    """
    total_speedup_low: float | None
    """Lower end of its 94% interval; null: too few repeats to say."""
    total_speedup_high: float | None
    """Upper end."""
    repeats: int
    """Rounds that were begun."""
    complete: bool
    """Whether nobody interrupted it."""
    ended_by_signal: int | None
    """Which signal interrupted it: 2 is Ctrl+C, 15 asks to end; null: none."""
    wall_s: float
    """Seconds in all."""

    def summary(self) -> str:
        """Return the bars, and where everything lies."""
        from flatout.measure.results import read
        from flatout.measure.table import bars
        from flatout.terminal import duration

        shown = bars(read(Path(self.path)), encoding=sys.stdout.encoding or "ascii")
        return f"{shown}\n\n{self.path}/  table.md, bench.svg, bench.json, trials.jsonl; {duration(self.wall_s)}"

    @property
    def exit_code(self) -> int:
        """The program's exit code: 130 or 143 after an interruption, although there are results."""
        return 0 if self.ended_by_signal is None else 128 + self.ended_by_signal


def bench(
    recipe: Annotated[str | Path, typer.Argument(help="A recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value, over the recipe; speedups= decides the full set."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stay within this time: trials get shorter, repeats fewer.", min=0.1),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Rounds at most; 5 when not given.", min=1)
    ] = None,
    sweep: Annotated[str | None, typer.Option(help=f"Sweep {SWEEPS} instead.")] = None,
    out: Annotated[
        Path | str | None,
        typer.Option(help="Folder for the results; by default bench/RECIPE-DIGEST."),
    ] = None,
    *,
    progress: Progress = SILENT,
) -> BenchResult:
    """Measure what each optimisation gains on this machine, or what a size costs.

    The ladder adds one speedup at a time to the plain way of training, up to the set that `train`
    would use; then leaves each out of it, and puts those into it that are off. Every trial is a
    process of its own; repeats are interleaved. Ctrl+C ends the measuring and shows what there is.
    Each trial is in trials.jsonl as soon as it ends. What each speedup gained on a GPU is kept for
    `flatout list speedups`.

    Raises: UsageError before anything was measured; RunFailed when nothing could be; Interrupted
            when nothing was by then.
    """
    from flatout.measure.bench import run_bench

    require_local(out or "", "--out ")
    config, place = load_config(recipe, overrides or ()), None if out is None else Path(out)
    report, place = run_bench(
        config,
        minutes=minutes,
        repeats=repeats,
        sweep=sweep,
        out=place,
        cache=CACHE,
        progress=progress,
    )
    total: Figure | None = report.total_speedup
    return BenchResult(
        path=str(place),
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
    """Do nothing when nothing is wrong with the words of a command line that can be told without
    torch; data at an address is fetched.

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
