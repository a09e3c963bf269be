"""Which checkpoints of a run stay: the newest, the best, and some for good. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from flatout.config.sections import CheckpointConfig
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.location import checkpoints_folder

DISK_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""


def newest_to_keep(config: CheckpointConfig) -> int | None:
    """Return the number of newest checkpoints that a configuration keeps; None means all."""
    return None if config.keep == "all" else config.keep


def has_all_files(checkpoint: Path) -> bool:
    """Return whether a checkpoint is complete, judged by the sizes of its files."""
    return not catalog.verify(checkpoint, check=catalog.check_size)


def prune(
    run_folder: Path,
    keep: int | None,
    best_step: int | None = None,
    keep_every: int | None = None,
    *,
    is_complete: Callable[[Path], bool] = has_all_files,
) -> list[int]:
    """Delete the checkpoints that are not to be kept, and return their steps.

    The newest `keep` complete ones stay, and all that are newer than these; so do the best one and
    the multiples of `keep_every`. With `keep=None`, or fewer complete ones than `keep`, all stay:
    incomplete ones do not count, so the last complete one is never deleted.
    Each one is renamed before it is deleted, so that a kill never leaves a partial checkpoint.
    """
    if keep is None:
        return []
    known = catalog.steps(run_folder)
    paths = {step: catalog.checkpoint_path(run_folder, step) for step in known}
    newest = list(islice((step for step in reversed(known) if is_complete(paths[step])), keep))
    if len(newest) < keep:
        return []
    deleted = [
        step
        for step in known
        if step < newest[-1] and step != best_step and not is_kept_for_good(step, keep_every)
    ]
    for step in deleted:
        shutil.rmtree(paths[step].rename(catalog.renamed(paths[step], "tmp-delete")))
    return deleted


def is_kept_for_good(step: int, keep_every: int | None) -> bool:
    """Return whether `checkpoint.keep_every` keeps the checkpoint of a step."""
    return bool(keep_every) and step > 0 and step % (keep_every or 1) == 0


def aside_paths(run_folder: Path) -> list[Path]:
    """Return the checkpoints that were set aside, by step."""
    found = checkpoints_folder(run_folder).glob("step-*.aside-*")
    own = (path for path in found if path.is_dir() and not path.is_symlink())
    return sorted(own, key=_original_step)


def delete_aside(path: Path) -> None:
    """Delete a checkpoint that was set aside; after a kill, the run's next start does the rest."""
    original = path.with_name(path.name.partition(".")[0])
    shutil.rmtree(path.rename(catalog.renamed(original, "tmp-delete")))


def steps_between_saves(config: CheckpointConfig, steps_per_epoch: float) -> int | None:
    """Return how many steps lie between two saves, or None when minutes do."""
    if config.every_epochs is not None:
        return max(round(config.every_epochs * steps_per_epoch), 1)
    return config.every_steps


def most_at_once(config: CheckpointConfig, steps: int, steps_per_epoch: float) -> int:
    """Return how many checkpoints of a run of `steps` are on the disk at once, at the most.

    The newest, the best, the one being written, those kept for good, and the one being sent to a
    mirror. With `keep=all`, saves at evaluations and by minutes are not foreseen.
    """
    newest = newest_to_keep(config)
    if newest is None:
        newest = steps // (steps_between_saves(config, steps_per_epoch) or steps or 1)
    for_good = steps // config.keep_every if config.keep_every else 0
    return newest + for_good + 2 + (config.mirror is not None)


def _original_step(path: Path) -> tuple[int, str]:
    number = path.name.partition(".")[0].removeprefix("step-")
    return int(number) if number.isdecimal() else -1, path.name
