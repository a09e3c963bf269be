"""The files of a run directory: its configuration, its events and its summary. No torch.

RUN/
├── config.yaml       fully resolved, with the choices of `auto`
├── asked.yaml        the configuration as requested, before `auto` was resolved
├── tokenizer.json    the dataset's tokenizer, so that the model can be used without the data
├── tokenizer_config.json  its special tokens, if other files than tokenizer.json stated them
├── chat_template.json  with conversations in the data: how their turns are written
├── events.jsonl      one line per event: starts, speedups, saves, resumes, alarms
├── metrics.jsonl     one line per logged step
├── loggers/          with log.to=wandb or mlflow: the run's id there
├── wandb/            with log.to=wandb: the files of W&B
├── summary.json      the finished run
├── findings.json     written by `flatout diagnose`
├── report.html       written by `flatout report`
├── divergence.json   why training diverged: the bad steps, their data, the largest gradients
├── exit_code         of the last process, for schedulers: torchrun rewrites exit codes
├── checkpoints/      see checkpoint/read_write.py; it may be a link to a directory on another disk
├── watchdog.txt      written when a run makes no progress: the stacks of its threads, by rank
├── origin.json       with --resume PATH: the checkpoint elsewhere that the run started from
└── lock              locked while a process trains, with its pid and host
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flatout.config import trust
from flatout.config.documents import dump_yaml, read_document
from flatout.config.schema import RunConfig, flat, validate
from flatout.data.conversation.templates import CHAT_TEMPLATE, CONFIG_FILE
from flatout.data.store.manifest import TOKENIZER
from flatout.display import amount
from flatout.errors import CheckpointError, ConfigError, FlatoutError, HardwareError
from flatout.storage.files import folder_bytes, write_text
from flatout.storage.json_io import (
    RESTORE,
    Json,
    JsonObject,
    append_line,
    finite_numbers,
    read_json,
    read_lines,
    write_json,
)
from flatout.storage.recognised import read_regular
from flatout.training.checkpoint import catalog

CONFIG, REQUESTED, EVENTS, SUMMARY, EXIT_CODE, LOCK, ORIGIN = (
    "config.yaml",
    "asked.yaml",
    "events.jsonl",
    "summary.json",
    "exit_code",
    "lock",
    "origin.json",
)
METRICS, BOARD = "metrics.jsonl", "tensorboard"
SKIPPED = "train/skipped_steps"
"""All bad steps of the run so far. A record has it if there were any."""
DIVERGENCE = "divergence.json"
LOGGER_STATES, WANDB_FILES, WATCHDOG = "loggers", "wandb", "watchdog.txt"
WRITTEN = (
    CONFIG,
    REQUESTED,
    TOKENIZER,
    CONFIG_FILE,
    CHAT_TEMPLATE,
    EVENTS,
    METRICS,
    SUMMARY,
    DIVERGENCE,
    EXIT_CODE,
    "base",
    BOARD,
    LOGGER_STATES,
    WANDB_FILES,
    WATCHDOG,
    ORIGIN,
    LOCK,
)
"""Files and directories that a run writes in its directory. None may be a link, so that a run
directory from an untrusted source cannot make a run write outside it.
"""
STARTED = (REQUESTED, ORIGIN, "base")
"""What a first start writes before config.yaml, which makes a directory a run directory."""


def write_config(folder: Path, config: RunConfig, *, requested: RunConfig | None = None) -> None:
    """Store the resolved configuration and the requested one, whose code is trusted from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    if requested is not None:
        write_requested(folder, requested)
    write_text(folder / CONFIG, _yaml(config))
    if requested is not None:
        trust.remember(folder, requested.references())


def write_requested(folder: Path, requested: RunConfig) -> None:
    """Store the configuration as requested."""
    write_text(folder / REQUESTED, _yaml(requested))


def trusted_config(folder: Path, *, trust_code: bool = False) -> RunConfig | None:
    """Return the resolved configuration of a run for use. Any code it names must be trusted.

    None when the directory contains no run. flatout/config/trust.py decides what is trusted.
    Raises: UntrustedCode.
    """
    config = read_config(folder)
    if config is not None:
        trust.require_trusted(folder, config.references(), trust_code=trust_code)
    return config


def read_config(folder: Path) -> RunConfig | None:
    """Return the resolved configuration of a run for reading only, or None when there is no run.

    To use what it names, call `trusted_config`.
    """
    return _read_yaml(folder / CONFIG)


def read_requested(folder: Path) -> RunConfig | None:
    """Return the requested configuration of a run, before `auto` was resolved.

    None when an earlier version, which did not store it, started the run.
    Raises: ConfigError when it is damaged.
    """
    return _read_yaml(folder / REQUESTED)


def read_settings(folder: Path) -> JsonObject:
    """Return a run's requested configuration under dotted keys, without importing what it names.

    Raises: ConfigError when it cannot be read.
    """
    return flat(
        read_document(folder / REQUESTED if (folder / REQUESTED).exists() else folder / CONFIG)
    )


def append_event(folder: Path, event: str, /, **fields: Json) -> JsonObject:
    """Append a line to events.jsonl and return it: `event`, `time` (seconds since 1970), fields."""
    line = {"event": event, "time": time.time(), **fields}
    append_line(folder / EVENTS, line)
    return line


def read_events(folder: Path) -> list[JsonObject]:
    """Return the run's events in order. Each names its kind, and may lack every other field."""
    return [line for line in read_lines(folder / EVENTS) if isinstance(line.get("event"), str)]


def read_records(folder: Path, *, tail_bytes: int | None = None) -> Iterator[dict[str, float]]:
    """Yield the run's records in order: the step and the other finite numbers of each line."""
    for line in read_lines(folder / METRICS, tail_bytes=tail_bytes):
        record = finite_numbers(line)
        if "step" in record:
            yield record


def write_summary(folder: Path, summary: JsonObject) -> None:
    """Store the summary of a run, which marks it as finished."""
    write_json(folder / SUMMARY, dict(summary))


def read_summary(folder: Path) -> JsonObject | None:
    """Return the summary of a finished run, or None.

    Its `run` is `folder`: the run may have been moved, or restored on another machine.
    """
    path = folder / SUMMARY
    if not path.exists():
        return None
    try:
        summary = read_json(path)
    except CheckpointError as error:
        raise damaged_summary(folder) from error
    if not isinstance(summary, dict):
        raise damaged_summary(folder)
    return {**summary, "run": str(folder)} if "run" in summary else summary


def damaged_summary(folder: Path) -> CheckpointError:
    """Return the error for a damaged summary."""
    path = folder / SUMMARY
    return CheckpointError(
        f"{path} is damaged.",
        fix=f"Delete {path} and run the same command again: the run is evaluated again.",
    )


def write_exit_code(folder: Path, code: int) -> None:
    """Store the exit code of this process, ignoring errors: a full disk must not change it."""
    with suppress(OSError):
        write_text(folder / EXIT_CODE, f"{code}\n")


def read_exit_code(folder: Path) -> int | None:
    """Return the exit code of the last process, or None while one is running or after a kill."""
    with suppress(OSError, ValueError):
        return int(read_regular(folder / EXIT_CODE))
    return None


def record_error(folder: Path, error: BaseException) -> None:
    """Append the event `error`, which records why a run failed, ignoring errors of the disk."""
    what, fix = (str(error).splitlines() or [""])[0][:300], None
    if isinstance(error, FlatoutError):
        what, fix = error.what, error.fix
    with suppress(OSError):
        append_event(folder, "error", kind=type(error).__name__, what=what, fix=fix)


def clear_exit_code(folder: Path) -> None:
    """Delete the exit code of the last process, as this one is now running."""
    (folder / EXIT_CODE).unlink(missing_ok=True)


def require_free_disk(folder: Path, needed_bytes: int) -> None:
    """Check that checkpoints of `needed_bytes` in total fit on the disk of the run's checkpoints.

    Existing checkpoints count as free space.
    Raises: HardwareError with both numbers.
    """
    disk = catalog.existing(folder / catalog.CHECKPOINTS)
    saved = [catalog.checkpoint_path(folder, step) for step in catalog.steps(folder)]
    needed_bytes -= sum(map(folder_bytes, saved))
    free = shutil.disk_usage(disk).free
    if free < needed_bytes:
        fewer = "keep fewer checkpoints (checkpoint.keep, checkpoint.keep_every)"
        raise HardwareError(
            f"The checkpoints of this run need {amount(needed_bytes, 'bytes')} more. "
            f"The disk of {disk} has {amount(free, 'bytes')} free.",
            fix=f"Free space there, or {fewer}."
            if saved
            else f"Free space there, {fewer}, or train on a larger disk with --run-dir DIR.",
        )


def list_runs(root: Path) -> list[Path]:
    """Return the run directories in `root` and one level below it, oldest first.

    Only `root` when it is a run directory itself.
    """
    if (root / CONFIG).exists():
        return [root]
    found = [
        path.parent for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in root.glob(pattern)
    ]
    return sorted(found, key=lambda path: ((path / CONFIG).stat().st_mtime, path))


def _yaml(config: RunConfig) -> str:
    return dump_yaml(config.to_dict())


def _read_yaml(path: Path) -> RunConfig | None:
    """Return the configuration in a file, or None without it. An empty one counts as damaged."""
    if not path.exists():
        return None
    document = read_document(path)
    if not document:
        raise ConfigError(f"{path} is damaged: it is empty.", fix=RESTORE)
    return validate(document, file=path)
