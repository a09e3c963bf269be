"""The run folder: its name, its lock, its configuration, its events and its summary. No torch.

RUN/
├── config.yaml     fully resolved; what `auto` chose is never chosen again
├── config.copy.yaml  the same, to show what was changed when config.yaml was edited
├── asked.yaml      the configuration as it was asked for, before `auto` was settled
├── tokenizer.json  the data set's tokenizer, so that the model can be tried without the data
├── events.jsonl    one line an event: starts, speedups, saves, resumes, alarms
├── metrics.jsonl   one line a log step
├── summary.json    the finished run
├── exit_code       how the last process ended, for schedulers: torchrun rewrites exit codes
├── checkpoints/    see catalog.py
├── origin.json    the checkpoint elsewhere from which the run began, with --resume PATH
├── owner.json      with checkpoint.dir: the id that marks the folder of its checkpoints as its own
└── lock            held while a process trains; names its pid and host
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from flatout import trust
from flatout.config.schema import RunConfig, difference, flat, validate
from flatout.data.store.manifest import TOKENIZER
from flatout.documents import read_document
from flatout.errors import CheckpointError, ConfigError, HardwareError, in_shell
from flatout.files import (
    append_line,
    folder_bytes,
    read_json,
    read_lines,
    write_json,
    write_text,
)
from flatout.progress import SILENT, Progress
from flatout.recognised import read_regular, recognise
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.config_seal import (
    COPY,
    require_as_trained,
    require_unedited,
    write_sealed,
)
from flatout.training.run_dir.origin import (
    ORIGIN,
    begun_from,
    read_origin,
    steps_before,
    write_origin,
)

FREE_KEYS = (
    "log.",
    "checkpoint.every_",
    "checkpoint.keep",
    "parallel.",
    "train.eval_every",
    "train.eval_tokens",
    "train.patience",
    "train.sample_every",
    "train.sample_prompt",
    "name",
)
"""Beginnings of the keys that may change when a run goes on: none of them changes what is computed,
but for the last bits of sums.
"""
LENGTH_KEYS = ("train.steps", "train.tokens", "train.epochs")
"""Of which one states how long a run is; training/longer.py says when that may grow."""
NAMELESS_KEYS = (*FREE_KEYS, "checkpoint.dir")
"""Beginnings of the keys that do not count in a run's name; where its checkpoints lie is settled
with the first of them.
"""

CONFIG, ASKED, EVENTS, SUMMARY, EXIT_CODE, LOCK = (
    "config.yaml",
    "asked.yaml",
    "events.jsonl",
    "summary.json",
    "exit_code",
    "lock",
)
METRICS, BOARD = "metrics.jsonl", "tensorboard"
WRITTEN = (
    CONFIG,
    COPY,
    ASKED,
    TOKENIZER,
    EVENTS,
    METRICS,
    SUMMARY,
    EXIT_CODE,
    "checkpoints",
    BOARD,
    ORIGIN,
    catalog.OWNER,
    LOCK,
)
"""What a run writes in its directory. None of it may be a link: a run that came from elsewhere must
not write to other places.
"""
STARTED = (COPY, ASKED, ORIGIN, catalog.OWNER)
"""What a first start writes before config.yaml, which makes a folder a run's."""


def run_name(config: RunConfig) -> str:
    """Return the folder name of a run: its recipe and eight characters of the digest of the
    configuration as asked for.

    NAMELESS_KEYS do not count, so that the same command with another `log.every` finds its run
    again.
    """
    plain = RunConfig()
    free = {
        key: plain.value(key)
        for key in _flat_keys(plain.to_dict())
        if key.startswith(NAMELESS_KEYS)
    }
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip(".-") or "run"
    return f"{stem}-{config.with_values(free).digest()[:8]}"


def write_config(folder: Path, config: RunConfig, *, asked: RunConfig | None = None) -> None:
    """Store the resolved configuration, and beside it the one that was asked for. Code of one's own
    that it names is trusted from here on.

    Raises: CheckpointError when the folder of its checkpoints is another run's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    catalog.claim(folder, catalog.place_in(config.checkpoint.dir, folder))
    if asked is not None:
        write_text(folder / ASKED, _yaml(asked))
    write_sealed(folder / CONFIG, _yaml(config))
    trust.remember(folder, config.references())


def replace_config(folder: Path, config: RunConfig, *, asked: RunConfig) -> None:
    """Store another resolved configuration of a run that exists. The one that was asked for comes
    last: until then, the same command repeats this.
    """
    write_config(folder, config)
    write_text(folder / ASKED, _yaml(asked))


def trusted_config(folder: Path, *, trust_code: bool = False) -> RunConfig | None:
    """Return what `read_config` does, of a run that is about to be used: code of its own must be
    trusted (flatout/trust.py).

    Raises: UntrustedCode; ConfigError when the model in it was changed after the run had started.
    """
    config = read_config(folder)
    if config is not None:
        trust.require_trusted(folder, config.references(), trust_code=trust_code)
        require_as_trained(folder / CONFIG, config)
    return config


def read_config(folder: Path) -> RunConfig | None:
    """Return the resolved configuration stored in a run folder, to look at, or None when it holds
    none; `trusted_config` is for use.
    """
    path = folder / CONFIG
    return validate(read_document(path), file=path) if path.exists() else None


def read_asked(folder: Path) -> RunConfig | None:
    """Return the configuration that a run was started with, before `auto` was settled; None where
    an earlier version wrote none.
    """
    path = folder / ASKED
    return validate(read_document(path), file=path) if path.exists() else None


def stored_config(folder: Path, wanted: RunConfig, *, trust_code: bool = False) -> RunConfig | None:
    """Return the run's stored configuration with the free keys of `wanted` laid over it; None when
    the folder holds no run.

    A run that has never saved has nothing to go on from: the next start is a new run, with settings
    of its own. The length that is stored stays, whatever `wanted` states: whether a run can be made
    longer takes its data (training/longer.py).
    Raises: UntrustedCode, before advice can repeat what config.yaml names; ConfigError for an
            edited config.yaml, and keys that contradict it.
    """
    stored = read_config(folder)
    if stored is None:
        return None
    catalog.require_own(folder)
    if not catalog.has_saved(folder) and not (folder / SUMMARY).exists():
        return None
    trust.require_trusted(
        folder, stored.references(), named=wanted.references(), trust_code=trust_code
    )
    require_unedited(folder / CONFIG, stored, free=(*NAMELESS_KEYS, "data.path"))
    free = (*FREE_KEYS, *LENGTH_KEYS)
    contradictions = difference(stored, wanted, free=free)
    if contradictions and (asked := read_asked(folder)) is not None:
        changed = {line.partition(": ")[0] for line in difference(asked, wanted, free=free)}
        contradictions = [line for line in contradictions if line.partition(": ")[0] in changed]
    if contradictions:
        raise ConfigError(
            f"{folder} holds a run with other settings: {'; '.join(contradictions)}.",
            fix=f"Keep the stored settings, or start another run; `--resume {in_shell(folder)} --run-dir DIR` starts it from this one.",
        )
    keys = (
        key for key in _flat_keys(wanted.to_dict()) if key.startswith(FREE_KEYS) and key != "name"
    )
    return stored.with_values(
        {key: value for key in keys if (value := wanted.value(key)) is not None}
    )


def resume_from(folder: Path, resume: str = "auto", *, progress: Progress = SILENT) -> Path | None:
    """Return the checkpoint to go on from, or None to begin; leftovers of killed saves are removed.
    Only under the lock.

    `auto` is the newest whole checkpoint of this run, or the beginning when it has none; `never`
    begins, and refuses a folder in which something lies; anything else is a checkpoint or a run
    folder to go on from. One from elsewhere is written down as this run's origin: the same call
    again, or `auto`, takes what the run has saved since, and the origin as long as that is nothing.
    Raises: CheckpointError.
    """
    if resume == "never":
        found = (
            sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, catalog.OWNER))
            if folder.is_dir()
            else []
        )
        if found:
            raise CheckpointError(
                f"--resume never would write over {folder}, which holds {', '.join(found[:4])}.",
                fix="Choose another folder with --run-dir DIR, delete this one, or go on with --resume auto.",
            )
        return None
    catalog.require_own(folder)
    for name in catalog.clean(folder):
        progress.say(f"Removed {name}, left by a save that was killed.")
    origin = read_origin(folder)
    path = str(Path(resume).resolve())
    if resume == "auto" or path == str(folder.resolve()):
        newest = catalog.latest(folder, but=steps_before(folder, origin), progress=progress)
        if newest is None and origin:
            return begun_from(folder, origin, progress)
        if newest is not None or resume == "auto":
            return newest
    if origin and path in (origin.asked, origin.checkpoint):
        newest = catalog.latest(folder, but=steps_before(folder, origin), progress=progress)
        if newest is not None:
            progress.say(
                f"Resuming from {newest.name} of {folder}, which continues {origin.checkpoint}."
            )
            return newest
    checkpoint = _checkpoint_at(Path(resume), progress)
    if checkpoint.resolve().parent != catalog.checkpoints_folder(folder).resolve():
        folder.mkdir(parents=True, exist_ok=True)
        write_origin(folder, asked=path, checkpoint=checkpoint)
    return checkpoint


def _checkpoint_at(path: Path, progress: Progress) -> Path:
    """Return the whole checkpoint that `path` is, or the newest of the run that it is."""
    known = recognise(path)
    if known is not None and path.is_file():
        raise CheckpointError(known.instead_of("a checkpoint"), fix=known.fix)
    if not path.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {path}.",
            fix="Name a folder such as RUN/checkpoints/step-100, or a run folder.",
        )
    if (path / CONFIG).exists() or (path / "checkpoints").is_dir():
        newest = catalog.latest(path, progress=progress)
        if newest is None:
            raise CheckpointError(
                f"The run {path} has no checkpoint.",
                fix="Name another run, or a folder such as RUN/checkpoints/step-100.",
            )
        return newest
    catalog.step_of(path)
    catalog.require_whole(path, progress=progress)
    return path


def append_event(folder: Path, event: str, /, **fields: Any) -> dict[str, Any]:
    """Add one line to events.jsonl, and return it: `event`, `time` (seconds since 1970), then the
    fields.
    """
    line = {"event": event, "time": time.time(), **fields}
    append_line(folder / EVENTS, line)
    return line


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the run's events in their order."""
    return list(read_lines(folder / EVENTS))


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Store the summary of a finished run: its presence says that the run is finished."""
    write_json(folder / SUMMARY, dict(summary))


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None."""
    path = folder / SUMMARY
    if not path.exists():
        return None
    summary = read_json(path)
    if not isinstance(summary, dict):
        raise damaged_summary(folder)
    return summary


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a run's configuration as it was asked for, under dotted keys; nothing of what it names
    is imported.

    Raises: ConfigError when it cannot be read.
    """
    return flat(read_document(folder / ASKED if (folder / ASKED).exists() else folder / CONFIG))


def damaged_summary(folder: Path) -> CheckpointError:
    """Return the error for a summary that is not what a run wrote."""
    path = folder / SUMMARY
    return CheckpointError(
        f"{path} is damaged.",
        fix=f"Delete {path} and run the same command again: the run is evaluated again.",
    )


def write_exit_code(folder: Path, code: int) -> None:
    """Say in the run folder how this process ended, where the disk takes it: a full one must not
    change how it ended.
    """
    with suppress(OSError):
        write_text(folder / EXIT_CODE, f"{code}\n")


def read_exit_code(folder: Path) -> int | None:
    """Return how the last process ended; None while one is at work, or when it was killed."""
    with suppress(OSError, ValueError):
        return int(read_regular(folder / EXIT_CODE))
    return None


def clear_exit_code(folder: Path) -> None:
    """Forget how the last process ended: this one is now at work."""
    (folder / EXIT_CODE).unlink(missing_ok=True)


def require_free_disk(folder: Path, needed_bytes: int, *, directory: str | None = None) -> None:
    """Do nothing when checkpoints of `needed_bytes` in all fit where the run's go; those it already
    has there count as room.

    `directory` is the run's `checkpoint.dir`.
    Raises: HardwareError with both figures.
    """
    place = catalog.place_in(directory, folder).absolute()
    there = [catalog.checkpoint_path(folder, step) for step in catalog.steps(folder)]
    held = sum(folder_bytes(path) for path in there)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free + held < needed_bytes:
        ways = (
            "lower checkpoint.keep"
            if there
            else "lower checkpoint.keep, or set checkpoint.dir to a larger disk"
        )
        raise HardwareError(
            f"The checkpoints of this run need {_size(needed_bytes - held)} more; the disk of {place} has {_size(free)} free.",
            fix=f"Free space there, or {ways}.",
        )


def list_runs(root: Path) -> list[Path]:
    """Return the run folders in `root` and one folder further down, oldest first; `root` itself
    when it is one.
    """
    if (root / CONFIG).exists():
        return [root]
    found = [
        path.parent for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in root.glob(pattern)
    ]
    return sorted(found, key=lambda path: ((path / CONFIG).stat().st_mtime, path))


def _size(num_bytes: int) -> str:
    unit, name = next(
        ((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= unit),
        (2**10, "KiB"),
    )
    return f"{num_bytes / unit:.1f} {name}"


def _yaml(config: RunConfig) -> str:
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def _flat_keys(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
