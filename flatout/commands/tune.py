"""Find the fastest settings of a recipe on this machine, and write them as a recipe."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from flatout.cache import default_cache
from flatout.commands import Command, Option, Overrides, RecipeName, train
from flatout.config.schema import load_config
from flatout.errors import in_shell
from flatout.json_io import JsonObject, Result
from flatout.measure.tune.parts import LEAST_MINUTES, parse_only
from flatout.progress import SILENT, Progress
from flatout.recognised import require_recipe_path

TUNED = "tuned.yaml"
MINUTES = 15.0
"""Time limit without --minutes."""


class TuneResult(Result):
    """The fastest setting, and everything that was measured."""

    path: str
    """The recipe with the fastest setting."""
    best: JsonObject
    """The fastest setting.

    It has rows_per_device, accumulate, prefetch, precision, speedups, tokens_per_s and gain with
    their intervals, peak_gib, and what its last trial rehearsed."""
    choices: list[JsonObject]
    """One object per change that was measured: its name, gain, verdict, promise, whether taken."""
    not_tried: list[dict[str, str]]
    """Changes that were not measured, with the reasons."""
    trials: list[JsonObject]
    """Every trial: the setting, the round, the seed and the figures."""
    tokens_per_step: int
    """Tokens per optimizer step, the same in every trial."""
    start: str
    """What everything was compared with: auto, unless that failed."""
    text: list[str]
    """The lines of the summary."""
    complete: bool
    """False after an interruption."""
    ended_by_signal: int | None
    """The signal that interrupted it: 2 for Ctrl+C, 15 for SIGTERM; null for none."""
    wall_s: float
    """Seconds in total."""

    def summary(self) -> str:
        """Return what each choice gained, and the command that trains the recipe."""
        from flatout.figures import duration

        ended = "" if self.complete else "Interrupted; these are the results so far.\n\n"
        shown, count = "\n".join(self.text), len(self.trials)
        trials = f"{count} trial{'' if count == 1 else 's'} in {duration(self.wall_s)}"
        return f"{ended}{shown}\n\n{trials}; train it with: flatout train {in_shell(self.path)}"

    @property
    def exit_code(self) -> int:
        """130 or 143 after an interruption, even though there are results."""
        return 0 if self.ended_by_signal is None else 128 + self.ended_by_signal


def tune(
    recipe: RecipeName,
    overrides: Overrides = None,
    minutes: Annotated[
        float,
        Option("Time limit: what is most promising is measured first.", min=LEAST_MINUTES),
    ] = MINUTES,
    only: Annotated[
        str | None,
        Option(
            "Tune only these, separated by commas: batch, checkpointing, speedups, prefetch, "
            "or names of speedups."
        ),
    ] = None,
    statistical: Annotated[
        bool, Option("Also try speedups with a statistical promise, over several seeds.")
    ] = False,
    out: Annotated[Path | str, Option("The recipe to write.")] = TUNED,
    *,
    progress: Progress = SILENT,
) -> TuneResult:
    """Find the fastest settings of a recipe on this machine, and write them as a recipe.

    It starts from what `train` would choose, and varies the micro-batch, activation checkpointing,
    the speedups and the prefetch by measured tokens per second. The tokens per optimizer step never
    change: other rows per micro-batch mean other accumulation. Every trial runs in its own process
    and also evaluates one batch, so that a setting does not run out of memory later; the fastest
    setting saves once, too. A change is taken if it is faster, and its losses are as promised.
    Speedups that the recipe names or leaves out stay as they are. Ctrl+C writes the best setting so
    far. The measured gains are kept for `auto`.

    Raises: UsageError before anything is measured; RunFailed when no setting gives figures;
            Interrupted when a signal arrives before that.
    """
    from flatout.measure.tune.report import header_lines
    from flatout.measure.tune.tune import run_tune

    start_s = time.monotonic()
    require_recipe_path(out, "--out ")
    tuning, ended_by = run_tune(
        load_config(recipe, overrides or ()),
        out=Path(out),
        minutes=minutes,
        only=parse_only(only),
        statistical=statistical,
        cache=default_cache(),
        progress=progress,
    )
    found = tuning.model_dump(mode="json")
    return TuneResult(
        path=str(out),
        **{
            name: found[name]
            for name in ("best", "choices", "not_tried", "trials", "tokens_per_step", "start")
        },
        text=header_lines(tuning),
        complete=ended_by is None,
        ended_by_signal=ended_by,
        wall_s=round(time.monotonic() - start_s, 1),
    )


def check(
    recipe: str,
    overrides: list[str] | None,
    only: str | None = None,
    out: Path | str = TUNED,
    progress: Progress = SILENT,
) -> None:
    """Check the command line as far as that is possible without torch; remote data is fetched.

    Raises: UsageError.
    """
    parse_only(only)
    require_recipe_path(out, "--out ")
    train.check(recipe, overrides, progress=progress)


COMMAND = Command(
    tune,
    example="flatout tune shakespeare-char data.path=data/s --minutes 10",
    check=check,
    needs_torch=True,
    writes_files=True,
)
