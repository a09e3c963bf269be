"""Runs and checkpoints by the names that people give them. No torch, so that a misspelt name is
answered at once.
"""

from __future__ import annotations

from pathlib import Path

from flatout.errors import CheckpointError, ConfigError, FlatoutError, in_shell
from flatout.progress import SILENT, Progress
from flatout.recognised import recognise, require_local
from flatout.registry import nearest
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout

RUNS = Path("runs")
"""Where a run is looked for whose name alone is given."""


def find_run(run: str | Path) -> Path:
    """Return the run folder that `run` names: a path, or a name under `runs/`.

    Raises: CheckpointError with the nearest run there is.
    """
    for place in (Path(run), RUNS / run) if str(run) else ():
        if (place / layout.CONFIG).exists():
            return place
    require_local(run, error=CheckpointError)
    above, step = Path(run).parent.parent, Path(run).name.removeprefix("step-")
    if step.isdecimal() and (above / layout.CONFIG).exists():
        raise CheckpointError(
            f"{run} is a checkpoint of the run {above}.",
            fix=f"Name {in_shell(above)}, with --checkpoint {step} where that can be given.",
        )
    found = next(
        (found for place in (Path(run), RUNS / run) if str(run) and (found := recognise(place))),
        None,
    )
    if found is not None:
        raise CheckpointError(found.instead_of("a run folder"), fix=found.fix)
    known = [path.name for path in layout.list_runs(RUNS)] if RUNS.is_dir() else []
    guess = nearest(Path(run).name, known)
    raise CheckpointError(
        f"{str(run) or 'An empty name'} is not a run folder: it has no config.yaml.",
        fix=f"Did you mean {in_shell(RUNS / guess)}?"
        if guess
        else "`flatout runs` shows the runs there are; `flatout demo` makes one.",
    )


def run_or_newest(run: str | Path | None, *, progress: Progress = SILENT) -> Path:
    """Return the run folder that `run` names; None is the newest run under `runs/` that has a
    checkpoint, and `progress` says which.

    Raises: CheckpointError when there is none.
    """
    if run is not None:
        return find_run(run)
    known = layout.list_runs(RUNS) if RUNS.is_dir() else []
    newest = next((path for path in reversed(known) if _has_checkpoint(path)), None)
    if newest is None:
        raise CheckpointError(
            f"No run under {RUNS}/ has a checkpoint.",
            fix="Name a run folder, or train one: `flatout demo` takes a few minutes.",
        )
    progress.say(f"The newest run: {newest}")
    return newest


def _has_checkpoint(run_folder: Path) -> bool:
    try:
        return bool(catalog.steps(run_folder))
    except FlatoutError:  # a damaged run has none that can be used
        return False


def resume_place(resume: str) -> str:
    """Return what `--resume` names: auto, never and paths as they are, a bare name as the run of
    that name under `runs/`.

    Raises: CheckpointError with the nearest run there is.
    """
    require_local(resume, "--resume ", error=CheckpointError)
    if resume in {"auto", "never"} or "/" in resume or Path(resume).is_dir():
        return resume
    try:
        return str(find_run(resume))
    except CheckpointError as error:
        raise CheckpointError(f"There is no checkpoint {resume}.", fix=error.fix) from error


def find_checkpoint(
    run_folder: Path, checkpoint: str = "best", *, progress: Progress = SILENT
) -> Path:
    """Return the checkpoint folder that `best`, `last` or a step names; `best` is the last one
    while no loss is known.

    Raises: CheckpointError when there is none, or it is not whole; ConfigError when `checkpoint` is
            none of these.
    """
    if checkpoint in {"best", "last"}:
        found = catalog.best(run_folder, progress=progress) if checkpoint == "best" else None
        found = found or catalog.latest(run_folder, progress=progress)
        if found is None:
            raise CheckpointError(
                f"The run {run_folder} has no checkpoint yet.",
                fix="Train it first: `flatout train` saves every ten minutes and at the end.",
            )
        return found
    if not checkpoint.isdecimal():
        raise ConfigError(
            f"{checkpoint!r} is not a checkpoint.", fix="Use best, last, or the number of a step."
        )
    path = catalog.checkpoint_path(run_folder, int(checkpoint))
    if not path.is_dir():
        known = ", ".join(str(step) for step in catalog.steps(run_folder)) or "none"
        raise CheckpointError(
            f"The run {run_folder} has no checkpoint of step {checkpoint}.",
            fix=f"Steps that have one: {known}.",
        )
    catalog.require_whole(path, progress=progress)
    return path
