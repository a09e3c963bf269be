"""Measure what each speedup gains here, or what a setting costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command, Overrides, RecipeName
from flatout.cli.commands.train import load_checked
from flatout.config.signature import Option, checked
from flatout.measure.results import Bench
from flatout.progress import SILENT, Progress
from flatout.storage.cache import default_cache
from flatout.storage.recognised import require_local


@checked
def bench(
    recipe: RecipeName,
    overrides: Overrides = None,
    minutes: Annotated[
        float | None,
        Option("Time limit: trials become shorter and repeats fewer to stay within it.", min=0.1),
    ] = None,
    repeats: Annotated[int | None, Option("Maximum number of rounds (default: 5).", min=1)] = None,
    sweep: Annotated[
        str | None,
        Option("Measure values of a setting instead: --sweep batch.rows_per_device=8,16,32."),
    ] = None,
    out: Annotated[
        Path | str | None, Option("Directory for the results (default: bench/RECIPE-DIGEST).")
    ] = None,
    *,
    progress: Progress = SILENT,
) -> Bench:
    """Measure what each speedup gains on this machine, or what a setting costs.

    The ablation starts at the baseline, without speedups, and adds one speedup at a time, up to the
    set that `train` would use. Then it removes each one from that set (leave one out), and adds
    each one that is off (add one). speedups=... chooses the full set. Every trial runs in its own
    process, and repeats are interleaved. Ctrl+C stops measuring and shows the results so far. The
    measured gains are kept for `flatout list speedups`.

    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    require_local(out or "", "--out ")
    config = load_checked(recipe, overrides)
    from flatout.measure.bench import run_bench

    return run_bench(
        config,
        minutes=minutes,
        repeats=repeats,
        sweep=sweep,
        out=out,
        cache=default_cache(),
        progress=progress,
    )


COMMAND = Command(
    bench,
    example="flatout bench shakespeare-char data.path=data/text --minutes 6",
    writes_files=True,
    is_timed=True,
)
