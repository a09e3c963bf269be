"""When a run saves its state, and the work around a save. `run.saver` does the saving."""

from __future__ import annotations

import hashlib
import math
import platform
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

from flatout.assembly.run import Run
from flatout.data.store.mix import members_of
from flatout.display import amount
from flatout.errors import DiskFull
from flatout.hardware.machine import fingerprint
from flatout.storage.files import TOO_LARGE
from flatout.storage.json_io import JsonObject
from flatout.training.agreement import WRITING, together
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import (
    CheckpointInfo,
    is_kept_for_good,
    newest_to_keep,
    steps_between_saves,
)
from flatout.training.metrics.log import Log
from flatout.training.run_dir.data_location import data_facts
from flatout.training.run_dir.lock import require_held
from flatout.training.soundness import require_sound

DEFAULT_MINUTES_BETWEEN_SAVES = 10.0
STEPS_BETWEEN_LOOKS = 10
"""Several ranks ask rank 0 for the time, which makes them wait for each other, at every tenth step.
"""


class SaveSchedule:
    """Decides when to save: every N steps or epochs, or every N minutes on rank 0.

    The checkpoints that `checkpoint.keep_every` keeps for good are saved in addition.
    """

    def __init__(self, run: Run, log: Log) -> None:
        config = run.config.checkpoint
        self._log = log
        self._steps = steps_between_saves(config, run.steps_per_epoch)
        self._seconds = 60 * (config.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES)
        self._saved_s = log.wall_s
        self._is_owed = False

    def due(self, run: Run) -> bool:
        """Return whether to save after this step. The last and best steps are saved elsewhere.

        A save that is due after a bad step waits for the next good one, so that a run that diverges
        keeps a checkpoint from before the bad steps.
        """
        is_due = self._is_time(run) or self._is_owed
        self._is_owed = is_due and self._log.bad_steps.in_a_row > 0
        return is_due and not self._is_owed

    def _is_time(self, run: Run) -> bool:
        is_best = run.config.checkpoint.best and run.best_step == run.step
        if run.step >= run.last_step or is_best:
            return False
        if is_kept_for_good(run.step, run.config.checkpoint.keep_every):
            return True
        if self._steps:
            return run.step % self._steps == 0
        if run.mesh.world_size > 1 and run.step % STEPS_BETWEEN_LOOKS:
            return False
        is_time = bool(run.mesh.broadcast_object(self._log.wall_s - self._saved_s >= self._seconds))
        if is_time:
            self._saved_s = self._log.wall_s
        return is_time


def save(run: Run, log: Log) -> None:
    """Save the run's state and delete the checkpoints that the configuration does not keep.

    Raises: RunFailed, before anything is written, as `require_held` and `require_sound`.
    """
    log.write_pending()  # so that a run killed after this save has every record up to its step
    require_own(run)
    require_sound(run, log)
    log.keep_clock()
    config = run.config.checkpoint
    with run.pulse.during("saving"):
        run.saver.save(
            run,
            environment=environment_of(run),
            keep=newest_to_keep(config),
            keep_every=config.keep_every,
            info=info_of(run, log).model_dump(mode="json"),
            progress=log.progress,
        )
        log_saves(run, log)


def require_own(run: Run) -> None:
    """Check on all ranks that rank 0 still has the run directory for itself, as `require_held`."""
    together(run.mesh, lambda: require_held(run.folder), WRITING)


@contextmanager
def unless_full(run: Run, log: Log) -> Iterator[None]:
    """Continue training when the disk has no room for a checkpoint, which all ranks learn together.

    Earlier checkpoints stay, and the next interval saves again.
    """
    try:
        yield
    except DiskFull as error:
        full = no_room(run, error)
        newest = catalog.steps(run.folder)[-1:]
        last = (
            f"The newest checkpoint is that of step {newest[0]}"
            if newest
            else "There is no checkpoint yet"
        )
        text = f"{full.what} Training continues. {last}."
        log.event("save_failed", text=text)
        if run.mesh.is_main:
            log.progress.say(text)


@contextmanager
def stating_room(run: Run) -> Iterator[None]:
    """Add to an error about a full disk what is free.

    Raises: DiskFull.
    """
    try:
        yield
    except DiskFull as error:
        raise no_room(run, error) from error


def no_room(run: Run, error: DiskFull) -> DiskFull:
    """Return the error with the step, and what is free."""
    what = f"At step {run.step}, {error.what[0].lower()}{error.what[1:]}"
    if error.fix == TOO_LARGE:  # whatever is free
        return DiskFull(what, fix=error.fix)
    disk = catalog.existing(run.folder / catalog.CHECKPOINTS)
    free = amount(shutil.disk_usage(disk).free, "bytes")
    return DiskFull(f"{what} {disk} has {free} free.", fix=error.fix)


def info_of(run: Run, log: Log) -> CheckpointInfo:
    """Return what a checkpoint of the current step states about itself.

    The caller has waited for the last step, so that reading its loss does not wait.
    """
    loss = None if log.last_result is None else float(log.last_result.loss)
    evaluated, evaluation = log.last_evaluation or (None, None)
    return CheckpointInfo(
        step=run.step,
        tokens=run.tokens,
        train_loss=loss if loss is not None and math.isfinite(loss) else None,
        val_loss=evaluation.loss if evaluation and evaluated == run.step else None,
        tokens_per_s=log.rates[-1].tokens_per_s if log.rates else None,
        elapsed_s=round(run.elapsed_s, 3),
        saved_at=time.time(),
        config_digest=run.config.digest(),
        host=socket.gethostname(),
        world_size=run.mesh.world_size,
        flatout=str(import_module("flatout").__version__),
        torch=torch.__version__,
        python=platform.python_version(),
        metrics_bytes=log.metrics_bytes,
    )


def log_saves(run: Run, log: Log) -> None:
    """Log the checkpoints completed since the last call.

    Raises: RunFailed, CheckpointError when a background save failed.
    """
    for saved in run.saver.finished(log.progress):
        times = {"seconds": round(saved.seconds, 3), "blocked_ms": round(1e3 * saved.blocked_s, 1)}
        log.event("save", step=saved.step, path=str(saved.path), **times)


def save_last(run: Run, log: Log) -> None:
    """Save the current step unless it is already saved, and wait for its checkpoint.

    Raises: DiskFull with what is free; as `save`.
    """
    path = catalog.checkpoint_path(run.folder, run.step)
    with unless_full(run, log):  # of an earlier save in the background
        wait_for_saves(run, log)
    with stating_room(run):
        if run.saver.newest_step != run.step and run.resumed_from != str(path):
            save(run, log)
        wait_for_saves(run, log)


def wait_for_saves(run: Run, log: Log) -> None:
    """Wait for the background save, if there is one.

    Raises: RunFailed, CheckpointError when it failed.
    """
    with run.pulse.during("saving"):
        run.saver.wait(log.progress)
    log_saves(run, log)


@contextmanager
def closing_saver(run: Run, log: Log) -> Iterator[None]:
    """On exit, wait for pending writes: another process may then use the run directory.

    A second Ctrl+C does not wait: what is being written never becomes a checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt:
        run.saver.abandon()
        raise
    finally:
        run.saver.close(log.progress)
        log_saves(run, log)


def environment_of(run: Run) -> JsonObject:
    """Return the environment that a checkpoint records, to compare when it is resumed.

    Bit-exact resumes depend on all of it, the best loss on `validation`, and the meaning of token
    ids on `tokenizer`.
    """
    members, tokens = members_of(run.dataset), run.config.train.eval_tokens
    scored = [f"{member.share} {member.dataset.manifest.digest_of('val')}" for member in members]
    scored.append(str(None if tokens == "all" else tokens))
    return {
        **fingerprint(str(run.mesh.device)),
        "datasets": data_facts(run.dataset),
        "validation": hashlib.sha256("".join(scored).encode()).hexdigest()[:16],
        "tokenizer": members[0].dataset.manifest.tokenizer.digest,
    }
