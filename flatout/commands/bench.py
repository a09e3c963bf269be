"""Measure what each speedup gains on this machine, or what a setting costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.cache import default_cache
from flatout.commands import Command, Option, Overrides, RecipeName, train
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.measure.experiments.report import Bench
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local

SWEEPS = "batch, seq_len, precision, accumulation or prefetch"


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
) -> Bench:
    """Measure what each speedup gains on this machine, or what a setting costs.

    The ladder starts at the baseline, without speedups, and adds one speedup at a time, up to the
    set that `train` would use; then it leaves each one out of that set, and adds each one that is
    off. speedups=... chooses the full set. Every trial runs in its own process, and repeats are
    interleaved. Ctrl+C stops measuring and shows the results so far. Each trial is written to
    trials.jsonl as soon as it ends. The measured gains are kept for `flatout list speedups`.

    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    from flatout.measure.experiments.bench import run_bench

    require_local(out or "", "--out ")
    return run_bench(
        load_config(recipe, overrides or ()),
        minutes=minutes,
        repeats=repeats,
        sweep=sweep,
        out=None if out is None else Path(out),
        cache=default_cache(),
        progress=progress,
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
