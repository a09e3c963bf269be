"""The loop: stage 2 on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from flatout.assembly.run import Run
from flatout.config.schema import TrainConfig
from flatout.data.store.mix import members_of
from flatout.hardware import fingerprint
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint import catalog
from flatout.training.evaluation import Evaluation, score
from flatout.training.metrics.log import Log, require_finite
from flatout.training.run_dir.data_location import data_digest, digest
from flatout.training.step import StepDropped, train_step

DEFAULT_MINUTES_BETWEEN_SAVES = 10.0


class StopFlag(Protocol):
    """Whether somebody asked the run to stop, agreed between ranks."""

    def asked(self, run: Run) -> bool:
        """Say whether every rank should stop after this step."""


def fit(
    run: Run,
    log: Log,
    stop: StopFlag,
    *,
    drop: Callable[[Run, int], bool] | None = None,
    sample: Callable[[Run], str] | None = None,
    progress: Progress = SILENT,
) -> Run:
    """Train from run.step to run.last_step, or until its patience is over or a signal asks to stop,
    and return the run.

    `stop` is asked after each step, `drop` between a step's micro-batches (see `train_step`): a
    step that is dropped leaves the run as it was before, and ends the training.
    """
    saves = SaveTimes(run, log)
    with run.cudnn_benchmark(), run.gc() as collect:
        while run.step < run.last_step and not ends_early(run) and not stop.asked(run):
            position, batch = run.feed.position, next(run.feed)
            try:
                with log.clock:
                    result = train_step(run, batch, drop)  # device work only
            except StepDropped:
                run.feed.seek(position)
                break
            run.step += 1
            run.tokens += batch.tokens
            log.step(batch, result)  # read back later
            if due(run.config.train.eval_every, run):
                with log.aside():
                    take_evaluation(run, log, max_tokens=eval_tokens(run), progress=progress)
            if due(run.config.train.sample_every, run):
                with log.aside():
                    draw_sample(run, log, sample)
            if saves.due(run):
                with log.aside():
                    write_checkpoint(run, log, progress=progress)
            note_saves(run, log, progress=progress)
            collect(run.step)
    return run


def ends_early(run: Run) -> bool:
    """Say whether the run is over before its last step. Every rank has the same losses, so every
    rank says the same.
    """
    return run.step < run.last_step and out_of_patience(run.config.train, run.step, run.best_step)


def out_of_patience(train: TrainConfig, step: int, best_step: int | None) -> bool:
    """Say whether `train.patience` evaluations have come and gone by `step` since the best one; it
    follows from these numbers alone.
    """
    return (
        bool(train.patience)
        and best_step is not None
        and step - best_step >= train.patience * train.eval_every
    )


def due(every: int, run: Run) -> bool:
    """Say whether something that happens every `every` steps (0: never) happens now; the last step
    has its own place.
    """
    return every > 0 and run.step % every == 0 and run.step < run.last_step


def eval_tokens(run: Run) -> int | None:
    """Return how many validation tokens an evaluation inside the run scores; None is all."""
    return None if run.config.train.eval_tokens == "all" else run.config.train.eval_tokens


def take_evaluation(
    run: Run,
    log: Log,
    *,
    max_tokens: int | None,
    drop: Callable[[Run, int], bool] | None = None,
    progress: Progress = SILENT,
) -> Evaluation | None:
    """Evaluate, write the record, and save when the loss is the best so far; without validation
    text, do nothing.

    Only losses on the same tokens compare: those that evaluations inside the run score decide which
    checkpoint is the best.
    Raises: RunFailed when the loss is not a number: the weights are lost, the checkpoints before
            are not. EvaluationDropped, as `score`.
    """
    evaluation = score(run, max_tokens=max_tokens, drop=drop, progress=progress)
    if evaluation is None:
        return None
    log.evaluation(evaluation)
    require_finite("validation loss", evaluation.loss, run.step)
    comparable = max_tokens == eval_tokens(run) or not run.config.train.eval_every
    if comparable and (run.best_val_loss is None or evaluation.loss < run.best_val_loss):
        run.best_val_loss, run.best_step = evaluation.loss, run.step
        write_checkpoint(run, log, progress=progress)
    return evaluation


def draw_sample(run: Run, log: Log, sample: Callable[[Run], str] | None) -> None:
    """Let the main rank write a sample; with sharded weights no rank holds the model, so there is
    none.
    """
    if sample and run.mesh.is_main and run.mesh.shard == 1:
        log.event("sample", text=sample(run))


def reserve(run: Run, log: Log, *, progress: Progress = SILENT) -> None:
    """Let the saver take the memory that it needs now, rather than inside the loop at the first
    save; say how much, and how long it took.
    """
    began_s = time.perf_counter()
    num_bytes = run.saver.reserve(run, progress)
    if num_bytes:
        log.event("reserve", bytes=num_bytes, seconds=round(time.perf_counter() - began_s, 3))


def write_checkpoint(run: Run, log: Log, *, progress: Progress = SILENT) -> None:
    """Save the run's state, drop the checkpoints that are no longer kept, and say so; `run.saver`
    decides what of it is done now.

    Raises: RunFailed, before anything is written, when the last step's figures are not numbers: the
            weights are lost.
    """
    log.require_finite_step()
    log.write_pending()  # a run that is killed after this save and resumes from it has every record up to its step
    log.keep_clock()
    run.saver.save(
        run, environment=environment_of(run), keep=run.config.checkpoint.keep, progress=progress
    )
    note_saves(run, log, progress=progress)


def note_saves(run: Run, log: Log, *, progress: Progress = SILENT) -> None:
    """Say which checkpoints have become whole since the last time.

    Raises: RunFailed, CheckpointError when one that was being written beside the loop could not be.
    """
    for saved in run.saver.finished(progress):
        times = {"seconds": round(saved.seconds, 3), "blocked_ms": round(1e3 * saved.blocked_s, 1)}
        log.event("save", step=saved.step, path=str(saved.path), **times)


def keep_last(run: Run, log: Log, *, progress: Progress = SILENT) -> None:
    """Have the state of this very step in a checkpoint that is whole, before the run says that it
    is over.
    """
    path = catalog.checkpoint_path(run.folder, run.step)
    if run.saver.newest_step != run.step and run.resumed_from != str(path):
        write_checkpoint(run, log, progress=progress)
    settle_saves(run, log, progress=progress)


def settle_saves(run: Run, log: Log, *, progress: Progress = SILENT) -> None:
    """Wait for the checkpoint that is being written beside the loop, if there is one.

    Raises: RunFailed, CheckpointError when it cannot be.
    """
    run.saver.wait(progress)
    note_saves(run, log, progress=progress)


@contextmanager
def saves_ended(run: Run, log: Log, *, progress: Progress = SILENT) -> Iterator[None]:
    """Leave, whatever happened inside, only when nothing is being written any more: the folder is
    then another process's to take.
    """
    try:
        yield
    finally:
        run.saver.close(progress)
        note_saves(run, log, progress=progress)


def environment_of(run: Run) -> dict[str, Any]:
    """Return what bit-exact resuming depends on, with `validation` what the best loss does, and
    with `tokenizer` what tokens mean.
    """
    parts = members_of(run.dataset)
    scored = [
        f"{part.share} {part.dataset.manifest.model_dump_json(include={'splits': {'val'}})}"
        for part in parts
    ]
    return {
        **fingerprint(str(run.mesh.device)),
        "data": data_digest(run.dataset),
        "validation": digest([*scored, str(eval_tokens(run))]),
        "tokenizer": parts[0].dataset.manifest.tokenizer.digest,
    }


class SaveTimes:
    """When the state is saved: every so many steps or epochs, or by the clock of the main rank."""

    def __init__(self, run: Run, log: Log) -> None:
        wanted = run.config.checkpoint
        self._log = log
        self._steps = wanted.every_steps
        if wanted.every_epochs is not None:
            self._steps = max(round(wanted.every_epochs * run.steps_per_epoch), 1)
        self._minutes = (
            None if self._steps else wanted.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES
        )
        self._saved_s = log.wall_s

    def due(self, run: Run) -> bool:
        """Say whether the state is saved after this step; the last step is saved in its own place."""
        if (
            run.step >= run.last_step or run.best_step == run.step
        ):  # the best is saved when it is found
            return False
        if self._steps:
            return run.step % self._steps == 0
        if run.step % run.config.log.every:
            return False
        is_time = self._log.wall_s - self._saved_s >= (self._minutes or 0) * 60
        is_time = bool(run.mesh.broadcast_object(is_time))
        if is_time:
            self._saved_s = self._log.wall_s
        return is_time
