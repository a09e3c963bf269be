"""Extend a stored run: it continues in place if its learning rates allow it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.assembly.resolve import steps_stated
from flatout.assembly.selection import recipe_of
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, in_shell
from flatout.optimizers.schedule import factor, warmup_steps
from flatout.progress import SILENT, Progress, counted
from flatout.training.checkpoint import catalog, location
from flatout.training.run_dir import layout
from flatout.training.run_dir.origin import read_origin, steps_before
from flatout.training.session import RunRequest


@dataclass(frozen=True)
class Longer:
    """A stored run with a new, greater length."""

    config: RunConfig
    """The resolved configuration with the new length."""
    requested: RunConfig
    """The configuration as the user wrote it, with the new length."""
    checkpoint: Path | None
    """The checkpoint to continue from; None is step 0, for a run without checkpoints."""
    steps_before: int
    """The number of steps it was planned for."""
    message: str
    """One line for the user that describes the change."""

    def store(self, run_folder: Path, *, progress: Progress = SILENT) -> None:
        """Write the new length. If this is killed, the same command completes it.

        Later checkpoints are set aside first: their learning rates followed the old length, so they
        must not be resumed with the new one.
        """
        if self.checkpoint is not None:
            for path in catalog.set_aside(run_folder, after=catalog.step_of(self.checkpoint)):
                progress.say(
                    f"Set {path.name.partition('.')[0]} aside: "
                    f"its learning rates were those of {counted(self.steps_before, 'step')}."
                )
        layout.replace_config(run_folder, self.config, requested=self.requested)


def lengthen(
    request: RunRequest, stored: RunConfig, resume: str, checkpoint: Path | None
) -> Longer | None:
    """Return the run with the requested length; None when it already has that length.

    Nothing is written yet. The run may continue from any checkpoint up to which the learning rates
    of both lengths agree: any at all with a constant schedule, one from before the decay with wsd.
    A warm-up given as a fraction keeps its number of steps.
    Raises: ConfigError, with an alternative, when the run would become shorter or has no such
            checkpoint.
    """
    folder = request.folder
    requested = layout.read_requested(folder) or stored
    length = _length(request.config)
    if not any(length.values()) or length == _length(requested):
        return None
    before = stored.train.steps or 0
    steps = steps_stated(stored, request.config.train, request.dataset, recipe_of(stored))
    if steps is None or steps == before:
        return None
    if steps < before:
        raise ConfigError(
            f"{folder} is planned for {counted(before, 'step')}, and {steps} were requested.",
            fix=f"Set train.steps={before}, or more to make it longer. "
            "For a shorter run, choose another directory with --run-dir DIR.",
        )
    warmup = warmup_steps(stored.schedule, before)
    keeps_warmup = warmup != warmup_steps(stored.schedule, steps)
    config = stored.with_values(
        {"train.steps": steps} | ({"schedule.warmup": warmup} if keeps_warmup else {})
    )
    start = _checkpoint_with_equal_rates(request, stored, config, resume, checkpoint)
    message = f"{folder} was planned for {counted(before, 'step')} and now trains to step {steps}"
    if start is not None and start != checkpoint:
        message += f", from step {catalog.step_of(start)}, before its learning rate starts to fall"
    message += f". Its warm-up stays at {counted(warmup, 'step')}." if keeps_warmup else "."
    requested = requested.with_values(length)
    return Longer(config, requested, start, before, message)


def _checkpoint_with_equal_rates(
    request: RunRequest,
    stored: RunConfig,
    longer: RunConfig,
    resume: str,
    checkpoint: Path | None,
) -> Path | None:
    """Return the newest checkpoint up to which both lengths have the same learning rates.

    If `--resume` names a checkpoint, it is the only candidate.
    Raises: ConfigError when there is none.
    """
    if checkpoint is None:
        return None
    folder, origin = request.folder, read_origin(request.folder)
    since = catalog.step_of(Path(origin.checkpoint)) if origin else 0
    equal = equal_rates(stored, longer, since=since)
    done = catalog.step_of(checkpoint)
    if done <= equal:
        return checkpoint
    if Path(resume).resolve() != checkpoint.resolve():
        later = [step for step in catalog.steps(folder) if step > equal]
        skipped = [*later, *steps_before(folder, origin)]
        found = catalog.latest(folder, exclude=skipped, progress=request.progress)
        if found is not None and catalog.step_of(found) <= equal:
            return found
    raise _bound_to_its_length(folder, stored, longer, equal, done)


def require_steps_left(folder: Path, config: RunConfig, checkpoint: Path | None) -> None:
    """Check that a new run that starts from another run's checkpoint has steps left.

    Raises: ConfigError that gives both step counts.
    """
    own = location.checkpoints_folder(folder).resolve()
    if checkpoint is None or checkpoint.resolve().parent == own:
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


def equal_rates(one: RunConfig, other: RunConfig, *, since: int = 0) -> int:
    """Return the first step, from `since` on, at which two configurations' rates differ.

    If they never differ, return the length of the shorter one.
    """
    lengths = one.train.steps or 0, other.train.steps or 0
    for step in range(since, min(lengths)):
        if factor(one.schedule, one.optim.lr, step, lengths[0]) != factor(
            other.schedule, other.optim.lr, step, lengths[1]
        ):
            return step
    return min(lengths)


def _bound_to_its_length(
    folder: Path, stored: RunConfig, longer: RunConfig, equal: int, done: int
) -> ConfigError:
    """Return the error for a run whose rates already depend on its length, with an alternative."""
    before, steps, peak = stored.train.steps or 0, longer.train.steps or 0, stored.optim.lr
    last_rate = peak * factor(stored.schedule, peak, done - 1, before)
    next_rate = peak * factor(longer.schedule, peak, done, steps)
    other = folder.with_name(f"{folder.name}-{steps}")
    return ConfigError(
        f"{folder} cannot be made longer, {before} -> {steps} steps: it is at step {done}, and "
        f"with schedule.kind={stored.schedule.kind} its learning rate has depended on its length "
        f"since step {equal + 1}.",
        fix=f"Add `--resume {in_shell(folder)} --run-dir {in_shell(other)}` to the same command: "
        f"a new run then continues from step {done} with the learning rates of a run of "
        f"{steps} steps; the rate changes from {last_rate:.3g} to {next_rate:.3g}.",
    )


def _length(config: RunConfig) -> dict[str, float | None]:
    return {key: config.value(key) for key in layout.LENGTH_KEYS}
