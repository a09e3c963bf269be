"""A run that is to be longer than it was planned: it continues in its own folder where its learning
rates allow that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.assembly.resolve import steps_stated
from flatout.assembly.selection import assemble, stored_decisions
from flatout.config.schema import RunConfig
from flatout.data.store.mix import MixedDataset
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, in_shell
from flatout.hardware import Machine
from flatout.optimizers.schedule import factor, warmup_steps
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.training.run_dir.origin import read_origin, steps_before


@dataclass(frozen=True)
class Longer:
    """What a run becomes when its length grows."""

    config: RunConfig
    """The resolved configuration with the new length."""
    asked: RunConfig
    """The configuration as it was asked for, with the new length."""
    checkpoint: Path | None
    """Where it continues; None begins, where a run has lost its checkpoints."""
    steps_before: int
    """The steps that it was planned for."""
    said: str
    """All of this in one line for a person."""

    def store(self, run_folder: Path, *, progress: Progress = SILENT) -> None:
        """Write the new length down. A kill at any moment leaves a run that the same command makes
        longer.

        Checkpoints after the one it continues from are set aside first: the new configuration must
        never be joined with their rates.
        """
        for path in (
            catalog.set_aside(run_folder, after=catalog.step_of(self.checkpoint))
            if self.checkpoint
            else ()
        ):
            progress.say(
                f"Set {path.name.partition('.')[0]} aside: its learning rates were those of {self.steps_before} steps."
            )
        layout.replace_config(run_folder, self.config, asked=self.asked)


def lengthened(
    place: Path,
    stored: RunConfig,
    asked: RunConfig,
    checkpoint: Path | None,
    *,
    resume: str,
    dataset: Dataset | MixedDataset,
    machine: Machine,
    progress: Progress = SILENT,
) -> Longer | None:
    """Return the run with the length that `asked` states, or None where that is the length it has;
    nothing is written yet.

    It may continue from a checkpoint up to which a run of the new length would have had the same
    learning rates: any one with a constant rate, one from before the decay with wsd. A warm-up that
    is a fraction of the run stays at its number of steps.
    Raises: ConfigError, with what works instead, when it would be shorter, or has no such
            checkpoint.
    """
    first = layout.read_asked(place) or stored
    if _length(asked) in ((None, None, None), _length(first)):
        return None
    before, steps = (
        stored.train.steps or 0,
        steps_stated(stored, asked.train, assemble(stored_decisions(stored, machine)), dataset),
    )
    if steps == before:
        return None
    if steps < before:
        raise ConfigError(
            f"{place} is planned for {before} steps, and {steps} are asked for.",
            fix=f"Set train.steps={before}, or more to make it longer. For a shorter run, choose another folder with --run-dir DIR.",
        )
    warmup = warmup_steps(stored.schedule, before)
    kept = {"schedule.warmup": warmup} if warmup != warmup_steps(stored.schedule, steps) else {}
    config = stored.with_values({"train.steps": steps, **kept})
    origin = read_origin(place)
    equal = equal_rates(
        stored, config, since=catalog.step_of(Path(origin.checkpoint)) if origin else 0
    )
    newest = checkpoint
    if (
        checkpoint
        and catalog.step_of(checkpoint) > equal
        and Path(resume).resolve() != checkpoint.resolve()
    ):
        later = [step for step in catalog.steps(place) if step > equal]
        checkpoint = catalog.latest(
            place, but=[*later, *steps_before(place, origin)], progress=progress
        )
    if newest and (checkpoint is None or catalog.step_of(checkpoint) > equal):
        raise _bound_to_its_length(place, stored, config, equal, catalog.step_of(newest))
    said = f"{place} was planned for {before} steps and now trains to step {steps}"
    said += (
        f", from step {catalog.step_of(checkpoint)}, before its rate begins to fall"
        if checkpoint and checkpoint != newest
        else ""
    )
    said += f". Its warm-up stays at {warmup} steps." if kept else "."
    return Longer(config, first.with_values(_stated(asked)), checkpoint, before, said)


def require_steps_left(place: Path, config: RunConfig, checkpoint: Path | None) -> None:
    """Check that a new run has steps left after the checkpoint of another run that it starts from.

    Raises: ConfigError with both steps.
    """
    if (
        checkpoint is None
        or checkpoint.resolve().parent == catalog.checkpoints_folder(place).resolve()
    ):
        return
    step, steps = catalog.step_of(checkpoint), config.train.steps or 0
    if step < steps:
        return
    raise ConfigError(
        f"{checkpoint} is at step {step}, and this run has {steps} steps: there is nothing left to train.",
        fix=f"Set train.steps to more than {step}, resume from an earlier checkpoint, or use train.init_from={in_shell(checkpoint)} "
        "in place of --resume: a run from step 0 that starts with its weights alone.",
    )


def equal_rates(one: RunConfig, other: RunConfig, *, since: int = 0) -> int:
    """Return the first step from `since` on at which two configurations train at different rates,
    or the length of the shorter one.
    """
    lengths = one.train.steps or 0, other.train.steps or 0

    def rates(step: int) -> tuple[float, float]:
        return factor(one.schedule, one.optim.lr, step, lengths[0]), factor(
            other.schedule, other.optim.lr, step, lengths[1]
        )

    return next(
        (step for step in range(since, min(lengths)) if len(set(rates(step))) > 1), min(lengths)
    )


def _bound_to_its_length(
    place: Path, stored: RunConfig, longer: RunConfig, equal: int, done: int
) -> ConfigError:
    """Return the refusal of a run whose rates have followed from its length, with the command that
    trains on at the new ones.
    """
    before, steps, peak = stored.train.steps or 0, longer.train.steps or 0, stored.optim.lr
    rates = (
        peak * factor(stored.schedule, peak, done - 1, before),
        peak * factor(longer.schedule, peak, done, steps),
    )
    other = place.with_name(f"{place.name}-{steps}")
    return ConfigError(
        f"{place} cannot be made longer, {before} -> {steps} steps: it is at step {done}, and with schedule.kind={stored.schedule.kind} its "
        f"learning rate has depended on its length since step {equal + 1}.",
        fix=f"Use `--resume {in_shell(place)} --run-dir {in_shell(other)}` in the same command: another run, which continues with the state of "
        f"step {done} at the rates of a run of {steps} steps, so that the rate goes from {rates[0]:.3g} to {rates[1]:.3g}.",
    )


def _length(config: RunConfig) -> tuple[float | None, ...]:
    return config.train.steps, config.train.tokens, config.train.epochs


def _stated(config: RunConfig) -> dict[str, float | None]:
    return dict(zip(layout.LENGTH_KEYS, _length(config), strict=True))
