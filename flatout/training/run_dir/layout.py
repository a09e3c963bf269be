"""The files of a run directory, and what is written there beside its checkpoints. No torch.

RUN/
├── config.yaml       the settings: `requested`, and `resolved`, with the choices of `auto`
├── events.jsonl      the journal, one line per event: starts, speedups, saves, summary, exit
├── metrics.jsonl     the table, one line per logged step
├── checkpoints/      see checkpoint/read_write.py; it may be a link to a directory on another disk
├── tokenizer.json    the dataset's tokenizer, so that the model can be used without the data
├── tokenizer_config.json  its special tokens, if other files than tokenizer.json stated them
├── chat_template.json  with conversations in the data: how their turns are written
├── exit_code         of the last process, for schedulers: torchrun rewrites exit codes
├── lock              locked while a process trains, with its pid and host
├── tensorboard/, wandb/  what loggers write
├── base/             with LoRA: the weights that the adapters belong to
├── watchdog.txt      written when a run makes no progress: the stacks of its threads, by rank
└── report.html       written by `flatout report`

`runlog.py` is the reader of the first three.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from flatout.assembly import preflight
from flatout.config import trust
from flatout.config.documents import dump_yaml, read_document
from flatout.config.schema import RunConfig, flat, validate
from flatout.data.conversation.templates import CHAT_TEMPLATE, CONFIG_FILE
from flatout.data.store.manifest import TOKENIZER
from flatout.display import amount
from flatout.errors import ConfigError, HardwareError
from flatout.progress import SILENT, Progress
from flatout.storage.files import folder_bytes, write_text
from flatout.storage.json_io import RESTORE, Json, JsonObject, append_line
from flatout.storage.recognised import read_regular
from flatout.training.checkpoint import catalog

CONFIG, EVENTS, METRICS, EXIT_CODE, LOCK = (
    "config.yaml",
    "events.jsonl",
    "metrics.jsonl",
    "exit_code",
    "lock",
)
REQUESTED, RESOLVED = SECTIONS = "requested", "resolved"
END = "...\n"
"""The end of config.yaml, as YAML marks it: without it, the file was cut."""
BOARD, WANDB_FILES, WATCHDOG = "tensorboard", "wandb", "watchdog.txt"
SKIPPED = "train/skipped_steps"
"""All bad steps of the run so far. A record has it if there were any."""
WRITTEN = (
    CONFIG,
    TOKENIZER,
    CONFIG_FILE,
    CHAT_TEMPLATE,
    EVENTS,
    METRICS,
    EXIT_CODE,
    "base",
    BOARD,
    WANDB_FILES,
    WATCHDOG,
    LOCK,
)
"""Files and directories that a run writes in its directory. None may be a link, so that a run
directory from an untrusted source cannot make a run write outside it.
"""


def write_config(folder: Path, config: RunConfig, *, requested: RunConfig | None = None) -> None:
    """Store the resolved configuration, and the requested one, whose code is trusted from now on.

    Without `requested`, the stored one stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sections = {
        "flatout": import_module("flatout").__version__,
        REQUESTED: (requested or read_requested(folder) or config).to_dict(),
        RESOLVED: config.to_dict(),
    }
    write_text(folder / CONFIG, f"{dump_yaml(sections)}{END}")
    if requested is not None:
        trust.remember(folder, requested.references())


def trusted_config(
    folder: Path, *, trust_code: bool = False, progress: Progress = SILENT
) -> RunConfig | None:
    """Return the resolved configuration of a run for use. Any code it names must be trusted.

    None when the directory contains no run. flatout/config/trust.py decides what is trusted.
    Raises: UntrustedCode; ConfigError when a name or a key of the model is wrong.
    """
    config = read_config(folder)
    if config is not None:
        trust.require_trusted(folder, config.references(), trust_code=trust_code)
        require_model(folder, config, progress)
    return config


def require_model(folder: Path, config: RunConfig, progress: Progress = SILENT) -> None:
    """Check the keys of the model of a run's trusted configuration.

    A new run may not state keys without effect. A run that did is the same model without them.
    Raises: ConfigError.
    """
    from flatout.assembly.shape import without_effect  # imports torch
    from flatout.models.language_model import model_of

    try:
        model_of(config, vocab_size=config.model.vocab_size or 1)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error.what}", fix=error.fix) from error
    stated = (read_requested(folder) or config).stated()
    for idle in without_effect(config):
        if idle.what.partition("=")[0] in stated:
            progress.say(f"{folder / CONFIG}: {idle.what}")


def read_config(folder: Path) -> RunConfig | None:
    """Return the resolved configuration of a run for reading only, or None when there is no run.

    To use what it names, call `trusted_config`.
    """
    return _read_section(folder, RESOLVED)


def read_requested(folder: Path) -> RunConfig | None:
    """Return the requested configuration of a run, before `auto` was resolved, or None.

    Raises: ConfigError when it is damaged.
    """
    return _read_section(folder, REQUESTED)


def read_sections(folder: Path) -> JsonObject:
    """Return the sections of config.yaml, without importing what they name.

    Raises: ConfigError when it cannot be read.
    """
    path = folder / CONFIG
    document = read_document(path)
    is_whole = f"\n{read_regular(path)}".rstrip().endswith(f"\n{END.rstrip()}")
    if not is_whole or not all(isinstance(document.get(key), dict) for key in SECTIONS):
        raise ConfigError(
            f"{path} has no settings under `requested` and `resolved`, or does not end with `...`: "
            "it was cut, or an earlier version of flatout wrote it.",
            fix=f"{RESTORE} A run of an earlier version is trained again.",
        )
    return document


def append_event(folder: Path, event: str, /, **fields: Json) -> JsonObject:
    """Append a line to events.jsonl and return it: `event`, `time` (seconds since 1970), fields."""
    line = {"event": event, "time": time.time(), **fields}
    append_line(folder / EVENTS, line)
    return line


def write_exit_code(folder: Path, code: int) -> None:
    """Store the exit code of this process, ignoring errors: a full disk must not change it."""
    with suppress(OSError):
        write_text(folder / EXIT_CODE, f"{code}\n")


def read_exit_code(folder: Path) -> int | None:
    """Return the exit code of the last process, or None while one is running or after a kill."""
    with suppress(OSError, ValueError):
        return int(read_regular(folder / EXIT_CODE))
    return None


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


def _read_section(folder: Path, name: str) -> RunConfig | None:
    if not (folder / CONFIG).exists():
        return None
    document = read_sections(folder)
    settings, writer = document[name], document.get("flatout")
    own = import_module("flatout").__version__
    try:
        if writer != own:  # a key that this version lacks, and that is not set, changes nothing
            known = flat(RunConfig().to_dict())
            for section, keys in settings.items():
                for key in [*keys] if section != "model" and isinstance(keys, dict) else ():
                    if keys[key] is None and f"{section}.{key}" not in known:
                        del keys[key]
        config = validate(settings)
        preflight.check_names(config)
        return config
    except ConfigError as error:
        what, fix = f"{folder / CONFIG}: {error.what}", error.fix
        if writer != own:
            what += f" flatout {writer} wrote it, and this is {own}."
            fix = f"Use the version that wrote it. {fix}"
        raise ConfigError(what, fix=fix) from error
