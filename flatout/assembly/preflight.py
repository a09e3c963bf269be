"""Checks without torch, whose import takes seconds: names, paths, data, sampling."""

from __future__ import annotations

from importlib.util import find_spec

from flatout.assembly.choices import parse_request
from flatout.config.registry import LOGGERS, MODELS, OPTIMIZERS
from flatout.config.schema import RunConfig
from flatout.config.sections import UPLOAD_OFF, CheckpointConfig, LogConfig
from flatout.data.store.mix import AnyDataset, members_of, open_data
from flatout.errors import ConfigError, DataError, MissingPackage, without_secrets
from flatout.hardware.machine import Machine, check_device_name, machine_named
from flatout.optim.schedule import factor
from flatout.storage.recognised import require_local
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.urls import is_local, is_url, protocol_of


def check(config: RunConfig) -> None:
    """Check that what a configuration names exists here and that its data is long enough.

    Raises: ConfigError, HardwareError or DataError that names the invalid setting.
    """
    check_settings(config)
    check_loggers(config.log)
    try:
        open_dataset(config)
    except (ConfigError, DataError):
        if MODELS.unstated(config.model.kind, config.model.own()):  # costs an import of torch
            from flatout.models.language_model import model_of

            model_of(config, vocab_size=config.model.vocab_size or 1)  # a wrong key comes first
        raise


def check_settings(config: RunConfig) -> None:
    """Check what does not depend on the machine and the data.

    Raises: ConfigError or HardwareError that names the invalid setting.
    """
    check_names(config)
    for name in config.log.to:
        LOGGERS.require(name)
    require_local(config.train.init_from or "", "train.init_from=", error=ConfigError)
    check_upload(config.checkpoint)
    check_device_name(config.train.device)


def check_names(config: RunConfig) -> None:
    """Check that the model, optimizer, schedule and speedups exist.

    Raises: ConfigError that suggests the nearest name.
    """
    MODELS.require(config.model.kind)
    OPTIMIZERS.require(config.optim.kind)
    factor(config.schedule, config.optim.lr, 0, config.train.steps or 1)
    parse_request(config.speedups)


def check_loggers(config: LogConfig) -> None:
    """Check that the packages of loggers are installed.

    Raises: ConfigError that suggests the nearest name; MissingPackage with the install line.
    """
    for name in config.to:
        package = None if ":" in name else LOGGERS.stated(name, "PACKAGE")
        if package and find_spec(package) is None:
            raise MissingPackage(
                f"log.to={name} needs the package {package}, which is not installed.",
                fix=f'Install it: `pip install "flatout[{name}]"`.',
            )


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

    Raises: ConfigError, also when the configuration trains on other devices.
    """
    named, train = machine_named(machine), config.train
    stated = "device=cpu" if train.device == "cpu" else f"devices={train.devices}"
    if train.device == "cpu" or train.devices not in (None, "all", named.gpus_per_node):
        raise ConfigError(
            f"train.{stated} and --machine {machine!r} contradict each other.",
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
