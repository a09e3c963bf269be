"""Make a training script or a recipe faster, by measured changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command, Overrides
from flatout.cli.commands.diagnose import require_one
from flatout.cli.commands.train import load_checked
from flatout.config.registry import SPEEDUPS, unknown_name
from flatout.config.schema import RunConfig
from flatout.config.signature import Argument, Option, checked, one_of
from flatout.errors import ConfigError
from flatout.measure.results import PARTS, ScriptTuning, Tuning
from flatout.progress import SILENT, Progress
from flatout.storage.cache import default_cache
from flatout.storage.recognised import require_recipe_path


@checked
def tune(
    recipe: Annotated[
        str | Path | RunConfig | None, Argument("A recipe's name, or a YAML file.")
    ] = None,
    overrides: Overrides = None,
    minutes: Annotated[
        float,
        Option("Time limit. The most promising settings are measured first.", min=1.0),
    ] = 15.0,
    only: Annotated[
        str | None,
        Option(
            "Tune only these, separated by commas: batch, checkpointing, speedups, or names of "
            "speedups."
        ),
    ] = None,
    statistical: Annotated[
        bool, Option("Also try speedups with a statistical tolerance, over several seeds.")
    ] = False,
    out: Annotated[
        Path | str | None,
        Option(
            "The recipe to write (default: tuned.yaml). Of a script, the directory (default: "
            "tuned-NAME, if something was found)."
        ),
    ] = None,
    patch: Annotated[
        Path | str | None, Option("Of a script: file for the unified diff, if there is one.")
    ] = None,
    *,
    script: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Tuning | ScriptTuning:
    """Make a training script faster by measured changes, or find a recipe's fastest settings.

    After `--` comes the command of any PyTorch training script, to make that faster without an
    edit: `flatout tune --patch faster.patch -- python train.py`. Its changes are applied from
    outside, in trials that run in a copy of the current directory. `flatout list changes` shows
    them, and `--only` selects some.

    For a recipe, as in `flatout tune my.yaml --minutes 10`, the fastest settings on this machine
    are written as a recipe. It starts from what `train` would choose, and varies the micro-batch,
    activation checkpointing and the speedups by measured tokens per second. The tokens per
    optimizer step never change: other rows per micro-batch mean other accumulation. Each trial runs
    in its own process. A change is taken if it is faster and its losses stay within the tolerance.
    Speedups that the recipe names or excludes stay as they are. Ctrl+C writes the best setting so
    far. The measured gains are kept for `auto`.

    Raises: UsageError before anything is measured; RunFailed when no setting gives results;
            Interrupted when a signal arrives before that.

    In Python, `script` are the words of the command.
    """
    require_one("tune", script, recipe, overrides or statistical)
    if recipe is None:
        from flatout.measure.scripts.changes import CHANGES
        from flatout.measure.scripts.tune import tune_script

        return tune_script(
            script,
            out=out,
            minutes=minutes,
            only=names_in(only, CHANGES, "change"),
            patch=patch,
            progress=progress,
        )
    one_of({"--patch": patch, "a recipe": recipe})
    out = out or "tuned.yaml"
    require_recipe_path(out, "--out ")
    parts = parse_only(only)
    config = load_checked(recipe, overrides)
    from flatout.measure.tune import run_tune

    return run_tune(
        config,
        out=Path(out),
        minutes=minutes,
        only=parts,
        statistical=statistical,
        cache=default_cache(),
        progress=progress,
    )


def parse_only(text: str | None) -> tuple[str, ...]:
    """Return the parts and speedups that `--only` names. All parts without it.

    Raises: ConfigError for an unknown one, with the nearest name.
    """
    known = dict.fromkeys([*PARTS, *SPEEDUPS.names()])
    return names_in(text, known, "part to tune") or PARTS


def names_in(text: str | None, known: Collection[str], what: str) -> tuple[str, ...]:
    """Return the names in a text, which commas separate. None without a text.

    Raises: ConfigError for an unknown one, with the nearest name, or a text without any.
    """
    names = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    if text is not None and not names:
        raise ConfigError(
            f"{text!r} names no {what}.",
            fix=f"Name one of {', '.join(known)}, or several with commas between them.",
        )
    for name in names:
        if name not in known:
            raise unknown_name(what, name, known)
    return names


COMMAND = Command(
    tune,
    example="flatout tune --patch faster.patch -- python train.py",
    writes_files=True,
    is_timed=True,
)
