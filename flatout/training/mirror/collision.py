"""Checks that the run in a mirror is the one that a command trains, before it is restored.

The name of a run directory is all that leads to its mirror, so another run may be there. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.errors import CheckpointError, ConfigError, FlatoutError
from flatout.training.mirror.remote import Sender
from flatout.training.run_dir import layout
from flatout.training.run_dir.config_seal import require_unedited
from flatout.training.run_dir.data_location import require_same_data, require_tokenizer
from flatout.training.run_dir.resume import continued

START_WITHOUT = (
    "Choose another run directory with --run-dir DIR, or set checkpoint.mirror=none to start "
    "without it."
)
OTHER_NAME = (
    "If it is another run, choose a run directory with another name with --run-dir DIR, or set "
    "another checkpoint.mirror."
)


def require_same_run(
    copy: Path,
    url: str,
    sender: Sender | None,
    requested: RunConfig,
    dataset_of: Callable[[RunConfig], AnyDataset],
) -> None:
    """Check that `requested` continues the run in the mirror at `url`.

    `copy` has the run's configuration and tokenizer, and the state of a checkpoint if it could be
    read. `dataset_of` returns the dataset with which this command trains a configuration. The rules
    are those for a run directory.

    Raises: ConfigError when the settings are others; CheckpointError when the tokenizer or the
            training tokens are, or there is no configuration.
    """
    try:
        stored, first = layout.read_config(copy), layout.read_requested(copy)
        if stored is not None:  # an empty file would be the defaults
            require_unedited(copy / layout.CONFIG, stored, free=layout.UNSEALED_KEYS)
    except FlatoutError as error:
        raise CheckpointError(_there(error, copy, url), fix=START_WITHOUT) from error
    if stored is None:
        raise CheckpointError(f"{url} has no {layout.CONFIG}.", fix=START_WITHOUT)
    own = {"checkpoint.dir": requested.checkpoint.dir}  # another machine has other disks
    config, contradictions = continued(
        stored.with_values(own), first and first.with_values(own), requested
    )
    if contradictions:
        asked = f"{url}/{layout.REQUESTED}"
        lost = "" if first else f" {asked}, with the settings as requested, is missing."
        restore = "" if first else f"Restore {asked} if there is a copy. "
        raise ConfigError(
            f"{url} contains a run with other settings{sent_by(sender)}: "
            f"{'; '.join(contradictions)}.{lost}",
            fix=f"{restore}{OTHER_NAME} If it is this run, keep its settings. "
            f"{layout.keys_that_may_change()}",
        )
    checkpoint = next(iter(copy.glob("step-*")), None)
    if checkpoint is None:
        return
    dataset = dataset_of(config)
    try:
        require_tokenizer(copy, dataset, checkpoint)
        require_same_data(copy, dataset, checkpoint)
    except CheckpointError as error:
        raise CheckpointError(
            f"{url} contains a run on other data{sent_by(sender)}. {_there(error, copy, url)}",
            fix=f"{OTHER_NAME} If it is this run, restore its dataset.",
        ) from error


def sent_by(sender: Sender | None) -> str:
    """Return which directory on which machine sent a run, as part of a sentence."""
    return f", sent by {sender.run} on {sender.host}" if sender else ""


def _there(error: FlatoutError, copy: Path, url: str) -> str:
    """Return what is wrong, with URLs in place of the paths of the copy."""
    return error.what.replace(str(copy), url)
