"""How a run resumes: the settings that may change, its checkpoint, its origin, a greater length."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from flatout.assembly.selection import recipe_of
from flatout.config import trust
from flatout.config.documents import read_document
from flatout.config.registry import RECIPES, recipe_path
from flatout.config.schema import RunConfig, difference, flat, load_config, parse_overrides
from flatout.data.store.mix import AnyDataset
from flatout.errors import CheckpointError, ConfigError, in_shell
from flatout.optim.schedule import factor, warmup_steps
from flatout.progress import SILENT, Progress, counted
from flatout.storage.json_io import read_model, write_json
from flatout.storage.recognised import recognise
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Check, check_file
from flatout.training.run_dir.data_location import data_values, moved_data
from flatout.training.run_dir.layout import (
    CONFIG,
    LOCK,
    ORIGIN,
    REQUESTED,
    SUMMARY,
    read_config,
    read_requested,
    write_config,
    write_requested,
)

FREE_KEYS = (
    "log.",
    "data.cache",
    "checkpoint.every_",
    "checkpoint.keep",
    "checkpoint.best",
    "checkpoint.upload",
    "checkpoint.compress",
    "parallel.",
    "train.devices",
    "train.eval_every",
    "train.eval_tokens",
    "train.patience",
    "train.sample_every",
    "train.sample_prompt",
    "train.watchdog_",
    "train.max_bad_steps",
    "name",
)
"""Prefixes of the keys that may change when a run resumes: they do not change what a step computes,
except for the last bits of sums. Some decide when the run ends.
"""
OF_THIS_START = ("parallel.", "train.devices", "data.cache")
"""Prefixes of the free keys that describe the machine: each start states its own."""
LENGTH_KEYS = ("train.steps", "train.tokens", "train.epochs")
"""One of them sets the length of a run. `lengthen` decides when it may grow."""
NAMELESS_KEYS = (*FREE_KEYS, "format_version")
"""Prefixes of the keys that do not affect a run's name."""


def run_name(recipe: str | Path | RunConfig, overrides: Iterable[str] = ()) -> str:
    """Return the name of a run's directory: its recipe, and 8 characters of what was stated.

    That is the values of the user's YAML and of the overrides, as they are parsed. A recipe of
    flatout counts by its name, a config built in Python by the fields that were set. So defaults
    may change with a release, and the same command finds its run again. NAMELESS_KEYS do not count.
    """
    config = load_config(recipe, overrides, trust_code=True)
    keys, values = {*parse_overrides(overrides, RunConfig)}, flat(config.to_dict())
    if isinstance(recipe, RunConfig):
        keys |= recipe.stated()
    elif (path := recipe_path(recipe)) in map(RECIPES.path, RECIPES.names()):
        keys, values = keys | {"recipe"}, values | {"recipe": path.stem}
    else:
        keys |= flat(read_document(path)).keys()
    stated = {
        key: values[key]
        for key in keys
        if values.get(key) is not None and not key.startswith(NAMELESS_KEYS)
    }
    text = json.dumps(stated, sort_keys=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip(".-") or "run"
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def settings_file(folder: Path) -> Path:
    """Return the file with the settings that a run was started with, to train them again.

    It is asked.yaml, or config.yaml if an earlier version, which did not store it, started the run.
    Raises: ConfigError when it is damaged.
    """
    return folder / (CONFIG if read_requested(folder) is None else REQUESTED)


def keys_that_may_change() -> str:
    """Return the sentence that lists the keys that may change when a run resumes."""
    keys = flat(RunConfig().to_dict()).keys()
    shown = [
        f"{prefix}*" if any(key.startswith(prefix) for key in keys - {prefix}) else prefix
        for prefix in FREE_KEYS
        if prefix != "name"
    ]
    return (
        f"Only these may change: {', '.join(shown)}; the paths of the same data; the "
        "micro-batch (batch.rows_per_device, batch.accumulate), if a step keeps its tokens; and "
        f"the length ({', '.join(LENGTH_KEYS)}), where the learning rates permit it."
    )


def config_to_resume(
    folder: Path, requested: RunConfig, *, trust_code: bool = False
) -> RunConfig | None:
    """Return a run's stored configuration with the free keys and data paths of `requested`.

    None when the directory contains no run, or one that has never saved: the next start is a new
    run and may change any setting. The stored length is kept, whatever `requested` sets: whether a
    run can be made longer depends on its data (`lengthen`). A different micro-batch is accepted
    if a step keeps its tokens, and moved data: `require_tokenizer` rejects a different tokenizer,
    and `require_same_data` different training tokens.
    Raises: UntrustedCode, before advice can repeat what config.yaml names; ConfigError for keys
            that contradict it, such as a different mix.
    """
    stored = read_config(folder)
    if stored is None and catalog.has_saved(folder):
        raise ConfigError(
            f"{folder} contains checkpoints, but no {CONFIG} with the settings of the run.",
            fix="Restore it from a copy, or start a new run from this one: "
            f"--resume {in_shell(folder)} --run-dir DIR.",
        )
    if stored is None:
        return None
    first = read_requested(folder)
    if not catalog.has_saved(folder) and not (folder / SUMMARY).exists():
        return None
    trust.require_trusted(
        folder, stored.references(), named=requested.references(), trust_code=trust_code
    )
    return continued(
        stored,
        first,
        requested,
        place=str(folder),
        fix="Keep the stored settings, or start a new run. "
        f"`--resume {in_shell(folder)} --run-dir DIR` starts it from this one.",
    )


def continued(
    stored: RunConfig,
    first: RunConfig | None,
    requested: RunConfig,
    *,
    place: str,
    sent_by: str = "",
    fix: str,
) -> RunConfig:
    """Return `stored` with the free keys, data paths and micro-batch that `requested` states.

    Free keys that it does not state keep their stored values, except OF_THIS_START.
    `first` is the request that the run started with, if it is known. `place` is where the run is,
    a path or a URL, and `sent_by` the end of that sentence.
    Raises: ConfigError, with `fix`, that names each key that contradicts the run and both values.
    """
    moved = moved_data(stored.data, requested.data)
    if moved is not None:
        requested = requested.with_values(data_values((first or stored).data))
    batch = _other_micro_batch(stored, requested)
    free = (*FREE_KEYS, *LENGTH_KEYS, *batch)
    contradictions = difference(stored, requested, free=free)
    if contradictions and first is not None:
        changed = {line.partition(": ")[0] for line in difference(first, requested, free=free)}
        contradictions = [line for line in contradictions if line.partition(": ")[0] in changed]
    if contradictions:
        asked = f"{place}/{REQUESTED}"
        lost = "" if first else f" {asked}, with the settings as requested, is missing."
        restore = "" if first else f"Restore {in_shell(asked)} if there is a copy. "
        raise ConfigError(
            f"{place} contains a run with different settings{sent_by}: {'; '.join(contradictions)}."
            f"{lost}",
            fix=f"{restore}{fix} {keys_that_may_change()}",
        )
    stated = requested.stated()
    values = {
        key: value
        for key, value in flat(requested.to_dict()).items()
        if key.startswith(FREE_KEYS)
        and (key in stated or key.startswith(OF_THIS_START))
        and key != "name"
    }
    return stored.with_values(values | batch | (moved or {}))


def _other_micro_batch(stored: RunConfig, requested: RunConfig) -> dict[str, int]:
    """Return the micro-batch that `requested` states, if a step keeps its tokens, else nothing.

    It changes only the last bits of sums, and the memory that a step needs.
    """
    rows, accumulate = requested.batch.rows_per_device, requested.batch.accumulate
    if stored.batch.rows_per_device == "auto" or requested.batch.chooses_rows:
        return {}
    per_step = stored.batch.rows_per_device * (stored.batch.accumulate or 1)
    if rows == "auto":
        rows = per_step // (accumulate or 1)
    elif accumulate is None and requested.batch.tokens_per_step is not None:
        accumulate = per_step // rows
    if rows * (accumulate or 1) != per_step:
        return {}
    return {"batch.rows_per_device": rows, "batch.accumulate": accumulate or 1}


class Origin(BaseModel):
    """The content of origin.json."""

    asked: str
    """The argument of --resume, as an absolute path."""
    checkpoint: str
    """The checkpoint that it resolved to."""


def read_origin(folder: Path) -> Origin | None:
    """Return the origin of a run, or None when it started without a checkpoint.

    Raises: CheckpointError when origin.json is damaged.
    """
    path = folder / ORIGIN
    fix = f"Delete {path}: the run then resumes from its own checkpoints."
    return read_model(path, Origin, fix=fix) if path.exists() else None


def resume_from(
    folder: Path,
    resume: str = "auto",
    *,
    check: Check = check_file,
    progress: Progress = SILENT,
) -> Path | None:
    """Return the checkpoint to resume from, or None to start. Call it only under the lock.

    `auto` resumes from the newest complete checkpoint of this run, or starts when it has none.
    `never` starts, and rejects a directory that is not empty. Anything else is a checkpoint or a
    run directory to resume from. A checkpoint of another run is stored as this run's origin, and
    checkpoints that are here are set aside: the same call, or `auto`, then resumes from the newest
    checkpoint saved since, or else from the origin. The leftovers of killed saves are deleted.
    Raises: CheckpointError.
    """
    if resume == "never":
        _require_empty(folder)
        return None
    for name in catalog.remove_leftovers(folder):
        progress.say(f"Removed {name}, left by a save that was killed.")
    origin = read_origin(folder)
    path = str(Path(resume).resolve())
    of_this_run = resume == "auto" or path == str(folder.resolve())
    if of_this_run or (origin and path in (origin.asked, origin.checkpoint)):
        newest = catalog.latest(folder, check=check, progress=progress)
        if newest is not None and not of_this_run and origin:
            progress.say(
                f"Resuming from {newest.name} of {folder}, which continues {origin.checkpoint}."
            )
        if newest is None and of_this_run and origin:
            return _origin_checkpoint(folder, origin, progress)
        if newest is not None or resume == "auto":
            return newest
    checkpoint = _checkpoint_at(Path(resume), progress)
    if not is_own(checkpoint, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in catalog.set_aside(folder, after=-1):
            progress.say(f"Set {earlier.name} aside: the run that starts here did not write it.")
        origin = Origin(asked=path, checkpoint=str(checkpoint.resolve()))
        write_json(folder / ORIGIN, origin.model_dump())
    return checkpoint


def is_own(checkpoint: Path, folder: Path) -> bool:
    """Return whether a checkpoint is among those of the run in `folder`."""
    return checkpoint.resolve().parent == (folder / catalog.CHECKPOINTS).resolve()


def _require_empty(folder: Path) -> None:
    paths = [*folder.iterdir()] if folder.is_dir() else []
    found = sorted(path.name for path in paths if path.name != LOCK and not _is_empty(path))
    if found:
        raise CheckpointError(
            f"--resume never would overwrite {folder}, which contains {', '.join(found[:4])}.",
            fix="Choose a different directory with --run-dir DIR, delete this one, or resume with "
            "--resume auto.",
        )


def _is_empty(path: Path) -> bool:
    """Return whether `path` is an empty directory for checkpoints, or a link to one."""
    return path.name == catalog.CHECKPOINTS and path.is_dir() and not any(path.iterdir())


def _checkpoint_at(path: Path, progress: Progress) -> Path:
    """Return the complete checkpoint at `path`, or the newest one of the run at `path`."""
    known = recognise(path)
    if known is not None and path.is_file():
        raise CheckpointError(known.instead_of("a checkpoint"), fix=known.fix)
    if not path.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {path}.",
            fix="Name a directory such as RUN/checkpoints/step-100, or a run directory.",
        )
    if (path / CONFIG).exists() or (path / "checkpoints").is_dir():
        newest = catalog.latest(path, progress=progress)
        if newest is None:
            raise CheckpointError(
                f"The run {path} has no checkpoint.",
                fix="Name a different run, or a directory such as RUN/checkpoints/step-100.",
            )
        return newest
    catalog.step_of(path)
    catalog.require_complete(path, progress=progress)
    return path


def _origin_checkpoint(folder: Path, origin: Origin, progress: Progress) -> Path:
    """Return the checkpoint that a run started from, when the run has saved nothing since.

    Raises: CheckpointError when it is gone or damaged.
    """
    path = Path(origin.checkpoint)
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} started from {path}, which no longer exists, and has saved nothing since.",
            fix=f"Name a different one with --resume PATH, or delete {folder / ORIGIN} to start "
            "without one.",
        )
    progress.say(
        f"Resuming from {path}, where this run started. To start without it, delete "
        f"{folder / ORIGIN}."
    )
    catalog.require_complete(path, progress=progress)
    return path


@dataclass(frozen=True)
class Longer:
    """A stored run with a new, greater length."""

    config: RunConfig
    """The resolved configuration with the new length."""
    requested: RunConfig
    """The configuration as the user wrote it, with the new length."""
    checkpoint: Path | None
    """The checkpoint to continue from. None means step 0, for a run without checkpoints."""
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
        write_config(run_folder, self.config)  # first: after a kill, the same command repeats both
        write_requested(run_folder, self.requested)


def lengthen(
    folder: Path,
    stored: RunConfig,
    asked: RunConfig,
    dataset: AnyDataset,
    resume: str,
    checkpoint: Path | None,
    *,
    progress: Progress,
) -> Longer | None:
    """Return the run with the length that `asked` states. None when it already has that length.

    Nothing is written yet. The run may continue from any checkpoint up to which the learning rates
    of both lengths agree: any at all with a constant schedule, one from before the decay with wsd.
    A warm-up given as a fraction keeps its number of steps.
    Raises: ConfigError, with an alternative, when the run would become shorter or has no such
            checkpoint.
    """
    from flatout.assembly.resolve import steps_stated  # imports torch

    requested = read_requested(folder) or stored
    length = {key: asked.value(key) for key in LENGTH_KEYS}
    if not any(length.values()) or all(requested.value(key) == length[key] for key in length):
        return None
    before = stored.train.steps or 0
    steps = steps_stated(stored, asked.train, dataset, recipe_of(stored))
    if steps is None or steps == before:
        return None
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
    start = _with_equal_rates(folder, stored, config, resume, checkpoint, progress)
    message = f"{folder} was planned for {counted(before, 'step')} and now trains to step {steps}"
    if start is not None and start != checkpoint:
        message += f", from step {catalog.step_of(start)}, before its learning rate starts to fall"
    message += f". Its warm-up stays at {counted(warmup, 'step')}." if keeps_warmup else "."
    return Longer(config, requested.with_values(length), start, before, message)


def _with_equal_rates(
    folder: Path,
    stored: RunConfig,
    longer: RunConfig,
    resume: str,
    checkpoint: Path | None,
    progress: Progress,
) -> Path | None:
    """Return the newest checkpoint up to which both lengths have the same learning rates.

    If `--resume` names a checkpoint, it is the only candidate.
    Raises: ConfigError when there is none.
    """
    if checkpoint is None:
        return None
    origin = read_origin(folder)
    since = catalog.step_of(Path(origin.checkpoint)) if origin else 0
    before, steps, peak = stored.train.steps or 0, longer.train.steps or 0, stored.optim.lr
    equal = next(
        (
            step
            for step in range(since, before)
            if factor(stored.schedule, peak, step, before)
            != factor(longer.schedule, peak, step, steps)
        ),
        before,
    )
    done = catalog.step_of(checkpoint)
    if done <= equal:
        return checkpoint
    if Path(resume).resolve() != checkpoint.resolve():
        later = [step for step in catalog.steps(folder) if step > equal]
        found = catalog.latest(folder, exclude=later, progress=progress)
        if found is not None and catalog.step_of(found) <= equal:
            return found
    raise _bound_to_its_length(folder, stored, longer, equal, done)


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
        f"{steps} steps. The rate changes from {last_rate:.3g} to {next_rate:.3g}.",
    )
