"""When a run saves its state, and the work around a save; `run.saver` does the saving."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from flatout.assembly.run import Run
from flatout.data.store.mix import members_of
from flatout.hardware import fingerprint
from flatout.json_io import JsonObject
from flatout.training.checkpoint import catalog
from flatout.training.metrics.log import Log
from flatout.training.run_dir.data_location import data_digest, digest

DEFAULT_MINUTES_BETWEEN_SAVES = 10.0


class SaveSchedule:
    """Decides when to save: every N steps or epochs, or every N minutes on the main rank."""

    def __init__(self, run: Run, log: Log) -> None:
        config = run.config.checkpoint
        self._log = log
        self._steps = config.every_steps
        if config.every_epochs is not None:
            self._steps = max(round(config.every_epochs * run.steps_per_epoch), 1)
        self._seconds = 60 * (config.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES)
        self._saved_s = log.wall_s

    def due(self, run: Run) -> bool:
        """Return whether to save after this step; the last and best steps are saved elsewhere."""
        saves_best = run.config.checkpoint.best
        if run.step >= run.last_step or (saves_best and run.best_step == run.step):
            return False
        if self._steps:
            return run.step % self._steps == 0
        if run.step % run.config.log.every:
            return False
        is_time = bool(run.mesh.broadcast_object(self._log.wall_s - self._saved_s >= self._seconds))
        if is_time:
            self._saved_s = self._log.wall_s
        return is_time


def reserve(run: Run, log: Log) -> None:
    """Allocate the saver's memory now rather than at the first save, and log it."""
    began_s = time.perf_counter()
    num_bytes = run.saver.reserve(run, log.progress)
    if num_bytes:
        log.event("reserve", bytes=num_bytes, seconds=round(time.perf_counter() - began_s, 3))


def save(run: Run, log: Log) -> None:
    """Save the run's state and delete the checkpoints that `checkpoint.keep` no longer covers.

    Raises: RunFailed, before anything is written, when the last step's figures are not finite: the
            weights are unusable.
    """
    log.require_finite_step()
    log.write_pending()  # so that a run killed after this save has every record up to its step
    log.keep_clock()
    keep = run.config.checkpoint.keep
    run.saver.save(run, environment=environment_of(run), keep=keep, progress=log.progress)
    log_saves(run, log)


def log_saves(run: Run, log: Log) -> None:
    """Log the checkpoints completed since the last call.

    Raises: RunFailed, CheckpointError when a background save failed.
    """
    for saved in run.saver.finished(log.progress):
        times = {"seconds": round(saved.seconds, 3), "blocked_ms": round(1e3 * saved.blocked_s, 1)}
        log.event("save", step=saved.step, path=str(saved.path), **times)


def save_last(run: Run, log: Log) -> None:
    """Save the current step unless it is already saved, and wait for its checkpoint."""
    path = catalog.checkpoint_path(run.folder, run.step)
    if run.saver.newest_step != run.step and run.resumed_from != str(path):
        save(run, log)
    wait_for_saves(run, log)


def wait_for_saves(run: Run, log: Log) -> None:
    """Wait for the background save, if there is one.

    Raises: RunFailed, CheckpointError when it failed.
    """
    run.saver.wait(log.progress)
    log_saves(run, log)


@contextmanager
def closing_saver(run: Run, log: Log) -> Iterator[None]:
    """On exit, wait for pending writes: another process may then use the run directory."""
    try:
        yield
    finally:
        run.saver.close(log.progress)
        log_saves(run, log)


def environment_of(run: Run) -> JsonObject:
    """Return the environment that a checkpoint records, to compare when it is resumed.

    Bit-exact resumes depend on all of it, the best loss on `validation`, and the meaning of token
    ids on `tokenizer`.
    """
    members, tokens = members_of(run.dataset), run.config.train.eval_tokens
    scored = [
        f"{member.share} {member.dataset.manifest.model_dump_json(include={'splits': {'val'}})}"
        for member in members
    ]
    return {
        **fingerprint(str(run.mesh.device)),
        "data": data_digest(run.dataset),
        "validation": digest([*scored, str(None if tokens == "all" else tokens)]),
        "tokenizer": members[0].dataset.manifest.tokenizer.digest,
    }
