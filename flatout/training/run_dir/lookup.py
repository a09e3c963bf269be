"""Find runs, their metrics and checkpoints by name. No torch: a misspelt name fails at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from flatout.config.registry import nearest
from flatout.errors import CheckpointError, ConfigError, FlatoutError, in_shell
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject
from flatout.storage.recognised import recognise, require_local
from flatout.storage.streams import shortened
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import RunLog

RUNS = Path("runs")
"""The directory in which runs are looked up by name."""
RESUME = ("auto", "never")
"""The values of `--resume` that are not paths."""
NEGATIVE = {"no", "none", "off", "false", "0"}
"""Words that others write for `never`."""
Table = dict[str, list[float | None]]
"""Columns by name, all of one length. None where nothing was measured."""


def find_run(run: str | Path) -> Path:
    """Return the run directory that `run` names: a path, or a name under `runs/`.

    Raises: CheckpointError that suggests the run with the nearest name.
    """
    candidates = (Path(run), RUNS / run) if str(run) else ()
    for path in candidates:
        if (path / layout.CONFIG).exists():
            return path
    require_local(run, error=CheckpointError)
    above, step = Path(run).parent.parent, Path(run).name.removeprefix("step-")
    if step.isdecimal() and (above / layout.CONFIG).exists():
        raise CheckpointError(
            f"{run} is a checkpoint of the run {above}.",
            fix=f"Name {in_shell(above)}, and add --checkpoint {step} if the command accepts it.",
        )
    found = next(filter(None, map(recognise, candidates)), None)
    if found is not None:
        raise CheckpointError(found.instead_of("a run directory"), fix=found.fix)
    if Path(run).is_dir():
        raise CheckpointError(
            f"{str(run) or 'An empty name'} is not a run directory: it has no config.yaml.",
            fix="`flatout runs` lists the runs. `flatout demo` makes one.",
        )
    if Path(run).is_file():
        raise CheckpointError(
            f"{run} is a file, not a run directory.", fix="`flatout runs` lists the runs."
        )
    known = run_names()
    guess = nearest(Path(run).name, known)
    hint = f"Did you mean {in_shell(RUNS / guess)}? " if guess else ""
    newest = f"The newest: {shortened(known)}" if known else "`flatout demo` makes one"
    raise CheckpointError(
        f"There is no run directory {run}{'' if '/' in str(run) else f' or {RUNS / run}'}.",
        fix=f"{hint}`flatout runs` lists those under {RUNS}/. {newest}.",
    )


def is_run(path: str | Path | None) -> bool:
    """Return whether `run_or_newest` takes `path`: a run, a name, or None. Else it is a model."""
    if path is None or str(path).startswith("hf:"):
        return path is None
    return not Path(path).exists() or (Path(path) / layout.CONFIG).is_file()


def run_names() -> list[str]:
    """Return the names of the runs under `runs/`, the newest first."""
    return [str(path.relative_to(RUNS)) for path in reversed(layout.list_runs(RUNS))]


def run_or_newest(run: str | Path | None, *, progress: Progress = SILENT) -> Path:
    """Return the run directory that `run` names, or for None the newest run with a checkpoint.

    The newest run is taken from `runs/`, and reported to `progress`.
    Raises: CheckpointError when there is none.
    """
    if run is not None:
        return find_run(run)
    newest = next(filter(_has_checkpoint, reversed(layout.list_runs(RUNS))), None)
    if newest is None:
        raise CheckpointError(
            f"No run under {RUNS}/ has a checkpoint.",
            fix="Name a run directory, or train a run: `flatout demo` takes a few minutes.",
        )
    progress.say(f"The newest run: {newest}")
    return newest


def _has_checkpoint(run_folder: Path) -> bool:
    try:
        return bool(catalog.steps(run_folder)) and layout.read_config(run_folder) is not None
    except FlatoutError:  # a damaged run has no usable checkpoint
        return False


def resume_path(resume: str) -> str:
    """Return the path that `--resume` names: for a bare name, the run of that name in `runs/`.

    `auto`, `never` and paths are returned unchanged.
    Raises: CheckpointError that suggests the run with the nearest name.
    """
    require_local(resume, "--resume ", error=CheckpointError)
    if resume in RESUME or "/" in resume or Path(resume).is_dir():
        return resume
    try:
        return str(find_run(resume))
    except CheckpointError as error:
        guess = "never" if resume.lower() in NEGATIVE else nearest(resume, [*RESUME, *run_names()])
        raise CheckpointError(
            f"--resume {resume} names no run or checkpoint.",
            fix=f"{f'Did you mean {guess!r}? ' * bool(guess)}Give auto, never, or the path of a "
            "checkpoint or a run directory.",
        ) from error


def find_checkpoint(
    run_folder: Path, checkpoint: str | None = None, *, progress: Progress = SILENT
) -> Path:
    """Return the checkpoint that `best`, `last` or a step names, for a reader of its weights.

    None is the best, or the last if there is none: no validation loss is known, or the best step
    was not saved, which one line then says. The content of the weights is checked, that of the
    optimizer's tensors is not.
    Raises: CheckpointError when it does not exist or is incomplete; ConfigError when `checkpoint`
            is none of these.
    """
    if checkpoint in {None, "best", "last"}:
        if catalog.latest(run_folder, deep=False, progress=progress) is None:
            raise CheckpointError(
                f"The run {run_folder} has no checkpoint yet.",
                fix="Train it first: `flatout train` saves every ten minutes and at the end.",
            )
        for step in reversed(catalog.steps(run_folder)):
            path = catalog.checkpoint_path(run_folder, step)
            if catalog.verify(path, deep=False):
                continue
            is_last = checkpoint == "last"
            best = None if is_last else catalog.best(path, deep="weights", progress=progress)
            if best is not None:
                return best
            if not (problems := catalog.verify(path, deep="weights", progress=progress)):
                return path if is_last else _instead_of_best(path, checkpoint, progress)
            if is_last or catalog.best_step_of(path) != step:  # else `best` has reported it
                progress.say(f"Checkpoint {path.name} cannot be used: {problems[0]}")
        catalog.latest(run_folder, deep="weights")  # its error names the first problem
    assert checkpoint is not None
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
    catalog.require_complete(path, deep="weights", progress=progress)
    return path


def _instead_of_best(last: Path, checkpoint: str | None, progress: Progress) -> Path:
    """Return the last checkpoint in place of the best, unless the best was asked for.

    Raises: CheckpointError.
    """
    step = catalog.best_step_of(last)
    why = (
        "No validation loss of this run is known, so no step is its best"
        if step is None
        else f"Step {step} had the lowest validation loss up to step {catalog.step_of(last)}, "
        "but has no complete checkpoint"
    )
    if checkpoint is not None:
        raise CheckpointError(
            f"{why}.", fix=f"Use --checkpoint last, which is step {catalog.step_of(last)}."
        )
    if step is not None:
        progress.say(f"{why}. Using the last one, of step {catalog.step_of(last)}.")
    return last


def metrics(run: str | Path | None = None) -> Table:
    """Return the metrics of a run as columns, for `pandas.DataFrame(flatout.metrics(run))`.

    Each row is a line of metrics.jsonl: `step` and the other positions, then the metrics that were
    measured at that step. Training and evaluation at one step are two rows, and metrics that a row
    lacks are None.

    Raises: CheckpointError when there is no such run. None is the newest run with a checkpoint.
    """
    return columns(RunLog(run_or_newest(run)).records())


def columns(records: Iterable[Mapping[str, float] | JsonObject]) -> Table:
    """Return records as columns, in the order in which the names first appear."""
    rows = list(records)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
