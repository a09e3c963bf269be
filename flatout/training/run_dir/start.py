"""Where a command starts: what the run directory has, and what is asked, decide it.

A run directory is one branch that only goes forward. Whatever goes back, or changes what was
trained, is a new directory: `--resume RUN/checkpoints/step-N --run-dir NEW`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, ConfigError, in_shell
from flatout.optim.schedule import factor, warmup_steps
from flatout.progress import SILENT, Progress, counted
from flatout.storage.json_io import JsonObject, parsing
from flatout.storage.recognised import kind_of, recognise
from flatout.storage.streams import shortened
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.layout import CONFIG, EVENTS, LOCK, read_requested
from flatout.training.run_dir.resume import LENGTH_KEYS, config_to_resume
from flatout.training.run_dir.runlog import Origin, RunLog


@dataclass(frozen=True)
class Start:
    """Where a command starts."""

    stored: RunConfig | None = None
    """The resolved configuration of a run that has saved, with what the command may change. None
    for a new run, whose settings are still to be resolved."""
    checkpoint: Path | None = None
    """The checkpoint to resume from. None: step 0."""
    origin: Origin | None = None
    """What a new run records when it starts from the checkpoint of another run."""
    requested: RunConfig | None = None
    """What the user wrote, with a new, greater length: `stored` has it too. None: as before."""
    summary: JsonObject | None = None
    """The summary of a finished run, for which nothing is left to train."""
    message: str | None = None
    """One line for the user."""
    rejected: tuple[int, ...] = ()
    """The steps of newer checkpoints, from which the run has ended in bad steps."""


def find_start(
    folder: Path,
    requested: RunConfig,
    resume: str = "auto",
    *,
    steps_of: Callable[[RunConfig], int | None] = lambda stored: None,
    trust_code: bool = False,
    known: Mapping[Path, str] | None = None,
    progress: Progress = SILENT,
) -> Start:
    """Return where a command starts. Nothing is written. Call it under the lock.

    `steps_of` returns the length that `requested` states, in steps of the stored run.
    Raises: CheckpointError, ConfigError for a request that contradicts the run, or that would go
            back; UntrustedCode.
    """
    if resume == "never":
        _require_empty(folder)
        return Start()
    log, path = RunLog(folder), (folder if resume == "auto" else Path(resume)).resolve()
    origin, is_here = log.origin, path == folder.resolve()
    continues = is_here or (origin and str(path) in (origin.asked, origin.checkpoint))
    if not continues and not is_own(path, folder) and catalog.has_saved(folder):
        raise CheckpointError(
            f"{folder} has checkpoints of its own, and {resume} is not among them.",
            fix="A new run starts from it: choose a different directory with --run-dir DIR.",
        )
    stored = config_to_resume(folder, requested, trust_code=trust_code, progress=progress)
    for note in log.notes:
        progress.say(note)
    rejected = log.rejected.intersection(catalog.steps(folder))
    if is_own(path, folder):
        rejected.discard(catalog.step_of(path))  # the user insists
    newest = catalog.latest(folder, exclude=rejected, known=known, progress=progress)
    if newest is not None:
        if not continues and path != newest.resolve():
            raise _goes_back(folder, _checkpoint_at(Path(resume), progress), newest)
        start = Start(stored, newest)
        if newer := sorted(step for step in rejected if step > catalog.step_of(newest)):
            named = ", ".join(f"step-{step}" for step in newer)
            message = (
                f"Resuming from {named} has ended in bad steps again: resuming from "
                f"{newest.name}, the checkpoint before."
            )
            start = replace(start, rejected=tuple(newer), message=message)
        elif origin and not is_here:
            message = f"Resuming from {newest.name} of {folder}, which continues "
            start = replace(start, message=f"{message}{origin.checkpoint}.")
    elif rejected:
        raise _none_sound(folder)
    elif origin and is_here:
        found = _checkpoint_of(origin, folder, progress)
        start = Start(stored, found, message=f"Resuming from {found}, where this run started.")
    elif resume != "auto":
        found = _checkpoint_at(Path(resume), progress)
        return Start(None, found, Origin(asked=str(path), checkpoint=str(found.resolve())))
    else:
        start = Start(stored)
    if stored is None:
        return start
    start = lengthened(start, folder, stored, requested, steps_of(stored), origin)
    summary, config = log.summary, start.stored or stored
    if summary is None or newest is None:
        return start
    advice = how_to_train_on(folder, config, newest, summary)
    if advice is None:
        return start
    message = f"{folder} is finished. Results are below. To train further, {advice}."
    return replace(start, requested=None, summary=summary, message=message)


def _none_sound(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"Every start from a checkpoint of {folder} has ended in values that are not finite, or "
        "that differ between ranks.",
        fix="If a device may compute wrong values, test it first. Then start a new run, with a "
        "lower optim.lr or a longer schedule.warmup: "
        f"`train.init_from={in_shell(folder)} --run-dir DIR` takes its weights and no moments. "
        "--resume RUN/checkpoints/step-N tries one once more.",
    )


def _goes_back(folder: Path, asked: Path, newest: Path) -> CheckpointError:
    """Return the error for a resume from an earlier step, with the command that does it."""
    other = folder.with_name(f"{folder.name}-from-{catalog.step_of(asked)}")
    return CheckpointError(
        f"{folder} has already saved step {catalog.step_of(newest)}, and a run only goes forward.",
        fix=f"Start a new run from {asked.name}: `--resume {in_shell(asked)} --run-dir "
        f"{in_shell(other)}`.",
    )


def is_own(checkpoint: Path, folder: Path) -> bool:
    """Return whether a checkpoint is among those of the run in `folder`."""
    return checkpoint.resolve().parent == (folder / catalog.CHECKPOINTS).resolve()


def _require_empty(folder: Path) -> None:
    paths = [*folder.iterdir()] if folder.is_dir() else []
    found = sorted(path.name for path in paths if path.name != LOCK and not _is_empty(path))
    if found:
        raise CheckpointError(
            f"--resume never would overwrite {folder}, which contains {shortened(found)}.",
            fix="Choose a different directory with --run-dir DIR, delete this one, or resume with "
            "--resume auto.",
        )


def _is_empty(path: Path) -> bool:
    """Return whether `path` is an empty directory for checkpoints, or a link to one."""
    return path.name == catalog.CHECKPOINTS and path.is_dir() and not any(path.iterdir())


def _checkpoint_at(path: Path, progress: Progress) -> Path:
    """Return the complete checkpoint at `path`, or the newest one of the run at `path`."""
    known = recognise(path)
    if known is not None and kind_of(path) is None:
        raise CheckpointError(known.instead_of("a checkpoint"), fix=known.fix)
    if not path.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {path}.",
            fix="Name a directory such as RUN/checkpoints/step-100, or a run directory.",
        )
    if (path / CONFIG).exists() or (path / "checkpoints").is_dir():
        newest = catalog.latest(path, exclude=RunLog(path).rejected, progress=progress)
        newest = newest or catalog.latest(path, progress=progress)
        if newest is None:
            raise CheckpointError(
                f"The run {path} has no checkpoint.",
                fix="Name a different run, or a directory such as RUN/checkpoints/step-100.",
            )
        return newest
    catalog.step_of(path)
    catalog.require_complete(path, progress=progress)
    return path


def _checkpoint_of(origin: Origin, folder: Path, progress: Progress) -> Path:
    """Return the checkpoint that a run started from, as the run has saved nothing since.

    Raises: CheckpointError when it is gone or damaged.
    """
    path = Path(origin.checkpoint)
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} started from {path}, which no longer exists, and has saved nothing since.",
            fix="Name a different one with --resume PATH, or choose a different directory with "
            "--run-dir DIR to start without one.",
        )
    catalog.require_complete(path, progress=progress)
    return path


def lengthened(
    start: Start,
    folder: Path,
    stored: RunConfig,
    asked: RunConfig,
    steps: int | None,
    origin: Origin | None,
) -> Start:
    """Return the start with the length that `asked` states, `steps`, if that is a new one.

    The run continues from its newest checkpoint, so the learning rates up to there must be those
    of the new length too: with a constant schedule they are, with wsd before the decay. A warm-up
    given as a fraction keeps its number of steps.
    Raises: ConfigError, with an alternative, when the run would become shorter or its rates have
            depended on its length.
    """
    requested = read_requested(folder) or stored
    length = {key: asked.value(key) for key in LENGTH_KEYS}
    if not any(length.values()) or all(requested.value(key) == length[key] for key in length):
        return start
    before = stored.train.steps or 0
    if steps is None or steps == before:
        return start
    if steps < before:
        raise ConfigError(
            f"{folder} is planned for {counted(before, 'step')}, but {steps} were requested.",
            fix=f"Set train.steps={before}, or more to make it longer. "
            "For a shorter run, choose a different directory with --run-dir DIR.",
        )
    warmup = warmup_steps(stored.schedule, before)
    keeps_warmup = warmup != warmup_steps(stored.schedule, steps)
    config = stored.with_values(
        {"train.steps": steps} | ({"schedule.warmup": warmup} if keeps_warmup else {})
    )
    _require_equal_rates(folder, stored, config, start.checkpoint, origin)
    message = f"{folder} was planned for {counted(before, 'step')} and now trains to step {steps}."
    message += f" Its warm-up stays at {counted(warmup, 'step')}." if keeps_warmup else ""
    return replace(start, stored=config, requested=requested.with_values(length), message=message)


def _require_equal_rates(
    folder: Path,
    stored: RunConfig,
    longer: RunConfig,
    checkpoint: Path | None,
    origin: Origin | None,
) -> None:
    """Check that a run's learning rates up to a checkpoint are those of its new length too.

    Raises: ConfigError with the command that starts a new run: from the newest checkpoint before
            the rates differ, or from the last one.
    """
    since = catalog.step_of(Path(origin.checkpoint)) if origin else 0
    before, steps, peak = stored.train.steps or 0, longer.train.steps or 0, stored.optim.lr
    done = catalog.step_of(checkpoint) if checkpoint else 0
    now, then = (
        [peak * factor(one.schedule, peak, step, length) for step in range(done + 1)]
        for one, length in ((stored, before), (longer, steps))
    )
    equal = next((step for step in range(since, done) if now[step] != then[step]), done)
    if done <= equal:
        return
    earlier = [step for step in catalog.steps(folder) if max(since, 1) <= step <= equal]
    start, source = (done, folder)
    if earlier:
        start, source = earlier[-1], catalog.checkpoint_path(folder, earlier[-1])
    rates = f"The rate changes from {now[done - 1]:.3g} to {then[done]:.3g}."
    raise ConfigError(
        f"{folder} cannot be made longer, {before} -> {steps} steps: it is at step {done}, and "
        f"with schedule.kind={stored.schedule.kind} its learning rate has depended on its length "
        f"since step {equal + 1}.",
        fix=f"Add `--resume {in_shell(source)} --run-dir "
        f"{in_shell(folder.with_name(f'{folder.name}-{steps}'))}` to the same command: a new run "
        f"then continues from step {start} with the learning rates of a run of {steps} steps. "
        f"{'' if earlier else rates}".rstrip(),
    )


def how_to_train_on(
    folder: Path, config: RunConfig, checkpoint: Path, summary: JsonObject
) -> str | None:
    """Return how to train a finished run further. None when it has steps and patience left."""
    train, step = config.train, catalog.step_of(checkpoint)
    if step >= (train.steps or 0):
        if config.schedule.kind in {"cosine", "linear"}:
            other = f"--resume {in_shell(folder)} --run-dir DIR"
            return f"start a new run: {other}, with a larger train.steps"
        return f"set train.steps to more than {train.steps}"
    with parsing(folder / EVENTS):
        stopped_early = summary.get("stopped_early") and step == summary["steps"]
        since = (step - summary["best_step"]) // (train.eval_every or 1) if stopped_early else 0
        since = summary.get("evaluations_since_best", since)
        if stopped_early and 0 < train.patience <= since:
            return f"set train.patience to more than {train.patience}, or to 0"
    return None


def require_steps_left(folder: Path, config: RunConfig, checkpoint: Path | None) -> None:
    """Check that a new run that starts from another run's checkpoint has steps left.

    Raises: ConfigError that gives both step counts.
    """
    if checkpoint is None or is_own(checkpoint, folder):
        return
    step, steps = catalog.step_of(checkpoint), config.train.steps or 0
    if step < steps:
        return
    raise ConfigError(
        f"{checkpoint} is at step {step}, and this run has {counted(steps, 'step')}: "
        "nothing is left to train.",
        fix=f"Set train.steps to more than {step}, resume from an earlier checkpoint, or replace "
        f"--resume with train.init_from={in_shell(checkpoint)}, "
        "which starts at step 0 with its weights.",
    )
