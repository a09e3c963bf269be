"""Checks without torch, whose import takes seconds: names, paths, data, sampling, step sizes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from flatout.assembly.recipe import divisors
from flatout.assembly.selection import parse_request
from flatout.config.registry import LOGGERS, MODELS, OPTIMIZERS
from flatout.config.schema import RunConfig
from flatout.config.sections import UPLOAD_OFF, CheckpointConfig, LogConfig
from flatout.data.store.mix import AnyDataset, members_of, open_data
from flatout.errors import ConfigError, DataError, MissingPackage, without_secrets
from flatout.hardware.machine import Machine, check_device_name, machine_named
from flatout.optim.schedule import factor
from flatout.progress import counted
from flatout.storage.recognised import require_local
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.urls import is_local, is_url, protocol_of

DEFAULT_TOKENS_PER_STEP = 65_536
"""Tokens per optimizer step if the configuration sets none of the three batch keys."""


def check(config: RunConfig) -> None:
    """Check that a configuration's names and paths exist and that its data is long enough.

    Raises: ConfigError, HardwareError or DataError that names the invalid setting.
    """
    check_names(config)
    check_loggers(config.log)
    check_paths(config)
    check_device_name(config.train.device)
    try:
        open_dataset(config)
    except (ConfigError, DataError):
        if MODELS.unstated(config.model.kind, config.model.own()):  # costs an import of torch
            from flatout.models.language_model import model_of

            model_of(config, vocab_size=config.model.vocab_size or 1)  # a wrong key comes first
        raise


def check_names(config: RunConfig) -> None:
    """Check that the model, optimizer, schedule and speedups exist.

    Raises: ConfigError that suggests the nearest name.
    """
    MODELS.require(config.model.kind)
    OPTIMIZERS.require(config.optim.kind)
    factor(config.schedule, config.optim.lr, 0, config.train.steps or 1)
    parse_request(config.speedups)


def check_loggers(config: LogConfig) -> None:
    """Check that the loggers exist and that their packages are installed.

    Raises: ConfigError that suggests the nearest name; MissingPackage with the install line.
    """
    for name in config.to:
        LOGGERS.require(name)
        package = None if ":" in name else LOGGERS.stated(name, "PACKAGE")
        if package and find_spec(package) is None:
            raise MissingPackage(
                f"log.to={name} needs the package {package}, which is not installed.",
                fix=f'Install it: `pip install "flatout[{name}]"`.',
            )


def check_paths(config: RunConfig) -> None:
    """Check that the paths a run starts from are local.

    Raises: ConfigError; as `check_upload` for checkpoint.upload, which is a URL.
    """
    require_local(config.train.init_from or "", "train.init_from=", error=ConfigError)
    check_upload(config.checkpoint)


def check_upload(config: CheckpointConfig) -> None:
    """Check that checkpoint.upload can be written, as far as that is known without its server.

    Raises: ConfigError; DataError when URLs of that kind are read-only; MissingPackage with the
            install line.
    """
    url = config.upload
    if url is None or url == UPLOAD_OFF:
        return
    why_not = None
    fix = "Write checkpoint.upload=s3://BUCKET/FOLDER, or file:///PATH for a directory."
    if not is_url(url):
        why_not = "is not a URL"
    elif without_secrets(url) != url:
        why_not = "must not contain a user, a password or a query"
        fix = (
            "Give credentials as the store expects them: environment variables, a profile or a "
            "login."
        )
    elif protocol_of(url) == "memory":
        why_not = "is in the memory of this process, and is lost with it"
    elif is_local(url) and not url.partition("://")[2].startswith("/"):
        why_not = "depends on the current directory"
        fix = "Write three slashes and the whole path: checkpoint.upload=file:///PATH."
    if why_not:
        raise ConfigError(f"checkpoint.upload={url} {why_not}.", fix=fix)
    RemoteFolder(url)
    if config.compress and find_spec("zstandard") is None:
        raise MissingPackage(
            f"checkpoint.compress={config.compress} needs the package zstandard, which is not "
            "installed.",
            fix='Install it: `pip install "flatout[zstd]"`.',
        )


def require_machine(config: RunConfig, machine: str) -> Machine:
    """Return the machine that `--machine` names.

    Raises: ConfigError, also when the configuration trains on a CPU.
    """
    named = machine_named(machine)
    if config.train.device == "cpu":
        raise ConfigError(
            f"train.device=cpu and --machine {machine!r} contradict each other.",
            fix="Remove one of the two.",
        )
    return named


def open_dataset(config: RunConfig) -> AnyDataset:
    """Open the dataset or mix of a configuration.

    Raises: ConfigError when it names none; DataError when one is not a dataset, or is shorter than
            one sequence.
    """
    data, seq_len = open_data(config.data), config.data.seq_len
    for part in members_of(data):
        tokens = part.dataset.split("train").num_tokens
        if tokens <= seq_len:
            shorter = 1 << max((tokens // 8).bit_length() - 1, 0)  # it fits several times
            raise DataError(
                f"{part.dataset.path} has {tokens:,} tokens for training. "
                f"One sequence of data.seq_len={seq_len} needs {seq_len + 1:,}.",
                fix=f"Set data.seq_len={shorter}, or prepare more text."
                if tokens > 1
                else "Prepare more text.",
            )
    return data


def resolve_batch(config: RunConfig, world_size: int) -> RunConfig:
    """Compute tokens_per_step, rows_per_device or accumulate from the other two.

    Raises: ConfigError when they contradict each other or do not divide among the processes.
    """
    batch, seq_len = config.batch, config.data.seq_len
    tokens, rows, accumulate = batch.tokens_per_step, batch.rows_per_device, batch.accumulate
    context, per_row = config.parallel.context, config.parallel.per_row
    if world_size % per_row:
        key = "context" if context > 1 else "tensor"
        processes = counted(world_size, "process", "processes")
        raise ConfigError(
            f"parallel.{key}={per_row} does not divide {processes}.",
            fix=f"Set train.devices to a multiple of {per_row}, or remove parallel.{key}.",
        )
    if seq_len % per_row:
        key, unit = ("context", 2 * per_row) if context > 1 else ("tensor", per_row)
        raise ConfigError(
            f"data.seq_len={seq_len} cannot be divided among the processes of "
            f"parallel.{key}={per_row}.",
            fix=f"Set data.seq_len={-(-seq_len // unit) * unit}.",
        )
    dp_size = world_size // per_row
    row_tokens = seq_len * dp_size
    unit = row_tokens * (1 if rows == "auto" else rows) * (accumulate or 1)
    if tokens is None:
        tokens = unit * (max(DEFAULT_TOKENS_PER_STEP // row_tokens, 1) if rows == "auto" else 1)
    all_stated = accumulate and rows != "auto"
    if tokens % unit or (all_stated and tokens != unit):
        nearest = unit * (1 if all_stated else max(round(tokens / unit), 1))
        parts = f"data.seq_len={seq_len}" + (f" x {dp_size} processes" if dp_size > 1 else "")
        parts += f" ({per_row} of {world_size} share each row)" if per_row > 1 else ""
        parts += f" x batch.rows_per_device={rows}" if rows != "auto" else ""
        parts += f" x batch.accumulate={accumulate}" if accumulate else ""
        raise ConfigError(
            f"batch.tokens_per_step={tokens} does not fit {parts}.",
            fix=f"Set batch.tokens_per_step={nearest}.",
        )
    if rows == "auto" and accumulate is not None:
        rows = tokens // unit
    values: dict[str, Any] = {"batch.tokens_per_step": tokens, "batch.rows_per_device": rows}
    if rows != "auto":
        values["batch.accumulate"] = tokens // (row_tokens * rows)
    return config.with_values(values)


def sizes_of(config: RunConfig) -> list[int]:
    """Return the numbers of processes among which the steps of a resolved run can be divided."""
    parallel, per_row = config.parallel, config.parallel.per_row
    unit = parallel.shard * parallel.tensor
    sequences = (config.batch.tokens_per_step or 0) // config.data.seq_len
    groups = (count for count in range(1, sequences + 1) if sequences % count == 0)
    return [count * per_row for count in groups if count * per_row % unit == 0]


def for_world_size(config: RunConfig, world_size: int) -> RunConfig:
    """Return a resolved configuration for a different number of processes, with the same steps.

    The micro-batch keeps its rows, or shrinks to the most that divide a process's share.
    Raises: ConfigError when the sequences of a step cannot be divided.
    """
    sequences = (config.batch.tokens_per_step or 0) // config.data.seq_len
    parallel, per_row = config.parallel, config.parallel.per_row
    unit = parallel.shard * parallel.tensor
    if world_size % unit or world_size % per_row or sequences % (world_size // per_row):
        keys = ("shard", "tensor", "context")
        stated = [f"parallel.{key}={getattr(parallel, key)}" for key in keys]
        sizes = ", ".join(map(str, sizes_of(config)[:8]))
        raise ConfigError(
            f"A step of {sequences} sequences cannot be divided among {world_size} processes "
            f"with {', '.join(stated)}.",
            fix=f"Start {sizes} processes." if sizes else "Remove these keys.",
        )
    share = sequences // (world_size // per_row)
    rows = next(divisors(share, int(config.batch.rows_per_device)))
    return config.with_values(
        {
            "batch.rows_per_device": rows,
            "batch.accumulate": share // rows,
            "parallel.replicate": world_size // unit,
        }
    )
