"""What can be said before torch is loaded, which takes seconds: of a configuration its names and
its data, of a sample its settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.assembly.request import parse_request
from flatout.config.schema import RunConfig
from flatout.data.store.mix import MixedDataset, members_of, open_data
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, DataError
from flatout.hardware import check_device_name
from flatout.optimizers.schedule import factor
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local
from flatout.registry import MODELS, OPTIMIZERS


def check(config: RunConfig, *, progress: Progress = SILENT) -> None:
    """Do nothing when names, data and the length of a window are such that a run can be tried.

    Raises: ConfigError, HardwareError or DataError naming what cannot be used.
    """
    check_names(config)
    check_places(config)
    check_device_name(config.train.device)
    open_dataset(config, progress=progress)


def check_names(config: RunConfig) -> None:
    """Do nothing when model, optimizer, schedule and speedups are names that exist.

    Raises: ConfigError with the nearest one.
    """
    MODELS.require(config.model.kind)
    OPTIMIZERS.require(config.optim.kind)
    factor(config.schedule, config.optim.lr, 0, config.train.steps or 1)
    parse_request(config.speedups)


def check_places(config: RunConfig) -> None:
    """Do nothing when the folders that a run begins from and saves to are of this machine.

    Raises: ConfigError.
    """
    for key in ("checkpoint.dir", "train.init_from"):
        require_local(config.value(key) or "", f"{key}=", error=ConfigError)


def open_dataset(config: RunConfig, *, progress: Progress = SILENT) -> Dataset | MixedDataset:
    """Open what a configuration names to train on; what lies at an address is fetched first.

    Raises: ConfigError when it names nothing; DataError when one is no data set, cannot be fetched,
            or holds not one window for training.
    """
    data, seq_len = open_data(config.data, progress=progress), config.data.seq_len
    for part in members_of(data):
        tokens = part.dataset.split("train").num_tokens
        if tokens <= seq_len:
            raise DataError(
                f"{part.dataset.origin} holds {tokens:,} tokens for training; one window of data.seq_len={seq_len} needs {seq_len + 1:,}.",
                fix=f"Set data.seq_len={_shorter(tokens)}, or prepare more text."
                if tokens > 1
                else "Prepare more text.",
            )
    return data


def _shorter(tokens: int) -> int:
    """Return a length of which some windows fit: a power of two, at most an eighth of the tokens."""
    return 1 << max((tokens // 8).bit_length() - 1, 0)


def check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, max_tokens: int, stop: Sequence[str]
) -> None:
    """Do nothing when the settings of a sample make sense.

    Raises: ConfigError naming the one that does not.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            f"A temperature of {temperature} cannot be used.",
            fix="Use 0 (always the likeliest token) to about 1.5.",
        )
    if top_k is not None and top_k < 1:
        raise ConfigError(
            f"top-k {top_k} leaves no token to draw.", fix="Use 1 or more, or leave it out."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(
            f"top-p {top_p} is not a share of the probability.",
            fix="Use a number above 0 and at most 1, or leave it out.",
        )
    if max_tokens < 1:
        raise ConfigError(f"max-tokens {max_tokens} asks for no text.", fix="Use 1 or more.")
    if not all(stop):
        raise ConfigError(
            "stop '' is no text to end before.",
            fix="Give the text before which a sample ends, or leave it out.",
        )
