"""The training loop: steps, with evaluations, samples and saves between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from flatout.assembly.run import Run
from flatout.config.sections import TrainConfig
from flatout.training.divergence import require_good_steps
from flatout.training.evaluation import Evaluation, EvaluationDropped, score
from flatout.training.halving import that_fits
from flatout.training.metrics.log import Log, require_finite
from flatout.training.saving import SaveSchedule, log_saves, save, stating_room, unless_full
from flatout.training.signals import WorkInterrupted
from flatout.training.step import Drop, StepDropped, StepResult, train_step

if TYPE_CHECKING:
    from flatout.data.load.feed import StepBatch


def fit(
    run: Run,
    log: Log,
    stop: Callable[[Run], bool],
    *,
    drop: Drop | None = None,
    sample: Callable[[Run], str] | None = None,
) -> Run:
    """Train to run.last_step, until patience runs out, or until a stop; return the run.

    `stop` is called before each step, and returns the same answer on all ranks; `drop` is called
    between micro-batches (see `train_step`) and between the batches of an evaluation. A dropped
    step leaves the run unchanged and ends the loop. A dropped evaluation also ends it, and
    `run.evaluation_due` is then True: the next process starts with it.
    Raises: RunFailed when training has diverged, as `require_good_steps`.
    """
    saves = SaveSchedule(run, log)

    def take_step() -> tuple[StepBatch, StepResult]:
        if run.feed.position != position:  # an attempt has failed
            run.feed.seek(position)
        batch = next(run.feed)
        with log.clock:
            return batch, train_step(run, batch, drop)  # device work only, does not wait

    with run.pulse.during("training"), run.cudnn_benchmark(), run.gc() as collect:
        if run.evaluation_due:
            _between_steps(run, log, saves, drop, sample)
        while (
            run.step < run.last_step
            and not run.evaluation_due
            and not ends_early(run)
            and not stop(run)
        ):
            position = run.feed.position
            try:
                batch, result = that_fits(run, log, take_step)
            except StepDropped:
                run.feed.seek(position)
                break
            run.step += 1
            run.tokens += batch.tokens
            log.step(batch, result)  # reads back one step late, so logging never stalls
            require_good_steps(run, log)
            _between_steps(run, log, saves, drop, sample)
            with unless_full(run, log):
                log_saves(run, log)
            collect(run.step)
    return run


def _between_steps(
    run: Run,
    log: Log,
    saves: SaveSchedule,
    drop: Drop | None,
    sample: Callable[[Run], str] | None,
) -> None:
    """Evaluate, sample and save, whichever is due; a dropped evaluation stays due."""
    run.evaluation_due = False
    if due(run.config.train.eval_every, run):
        with log.aside():
            try:
                log_evaluation(run, log, drop=drop)
            except EvaluationDropped:
                run.evaluation_due = True
                return
    if due(run.config.train.sample_every, run):
        with log.aside():
            log_sample(run, log, sample)
    if saves.due(run):
        with log.aside(), unless_full(run, log):
            save(run, log)


def due(every: int, run: Run) -> bool:
    """Return whether work done every `every` steps (0: never) is due; never at the last step."""
    return every > 0 and run.step % every == 0 and run.step < run.last_step


def ends_early(run: Run) -> bool:
    """Return whether patience ran out before the last step; all ranks have the same losses."""
    return run.step < run.last_step and out_of_patience(run.config.train, run.step, run.best_step)


def out_of_patience(train: TrainConfig, step: int, best_step: int | None) -> bool:
    """Return whether the last `train.patience` evaluations did not improve on the best one."""
    if not train.patience or best_step is None:
        return False
    return step - best_step >= train.patience * train.eval_every


def eval_tokens(run: Run) -> int | None:
    """Return how many validation tokens each evaluation of the run scores; None means all."""
    train = run.config.train
    return None if train.eval_tokens == "all" or not train.eval_every else train.eval_tokens


def log_evaluation(run: Run, log: Log, *, drop: Drop | None = None) -> Evaluation | None:
    """Evaluate, write the record, and save if the loss is the best so far.

    With `checkpoint.best=false` only the last step is saved, so that its checkpoint says whether it
    is the best.

    Returns: None when there is no validation text.
    Raises: RunFailed when the loss is not finite: the weights are unusable, earlier checkpoints are
            unaffected. EvaluationDropped, as `score`. DiskFull at the last step.
    """
    evaluation = that_fits(
        run,
        log,
        lambda: score(run, max_tokens=eval_tokens(run), drop=drop, progress=log.progress),
    )
    if evaluation is None:
        return None
    log.evaluation(evaluation)
    require_finite("validation loss", evaluation.loss, run.step)
    if run.best_val_loss is None or evaluation.loss < run.best_val_loss:
        run.best_val_loss, run.best_step = evaluation.loss, run.step
        is_last = run.step == run.last_step
        if run.config.checkpoint.best or is_last:
            with stating_room(run) if is_last else unless_full(run, log):
                save(run, log)
    return evaluation


def log_sample(run: Run, log: Log, sample: Callable[[Run], str] | None) -> None:
    """Log a sample on the main rank; with sharded weights, no rank has the whole model.

    A sample that a stop request interrupts is not logged.
    """
    if sample and run.mesh.is_main and run.mesh.shard == 1:
        with run.pulse.during("sampling"), suppress(WorkInterrupted):
            log.event("sample", text=sample(run))
