"""The training loop: steps, with evaluations, samples and saves between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from flatout.assembly.run import Run
from flatout.distributed.rendezvous import expect_steps
from flatout.errors import DataError
from flatout.training.divergence import require_good_steps
from flatout.training.evaluation import Evaluation, score
from flatout.training.metrics.log import Log
from flatout.training.saving import SaveSchedule, log_saves, save, stating_room, unless_full
from flatout.training.signals import WorkInterrupted
from flatout.training.soundness import require_sound
from flatout.training.step import Dropped, train_step


@dataclass(frozen=True)
class Session:
    """A run in progress, its log, and what may stop it."""

    run: Run
    log: Log
    """Also holds `progress`, where the run reports to the user."""
    stop: Callable[[Run], bool] = lambda _run: False
    """Called before each step: whether to end the loop. All ranks get the same answer."""
    drop: Callable[[Run, int], bool] | None = None
    """Called before batch 2 and later of a step or an evaluation, with its number: whether to drop
    that work. All ranks get the same answer."""
    sample: Callable[[Run], str] | None = None
    """Generates a short text with the model in its current state."""


def fit(session: Session) -> Run:
    """Train to run.last_step, until patience runs out, or until a stop, and return the run.

    A dropped step leaves the run unchanged and ends the loop. A dropped evaluation also ends it,
    and `run.evaluation_due` is then True: the next process starts with it.
    Raises: RunFailed when training has diverged, as `require_good_steps`.
    """
    run, log, first = session.run, session.log, session.run.step
    saves, phase = SaveSchedule(run, log), log.clock.timer.phase
    with run.pulse.during("training"), run.parts.cudnn_benchmark(), run.parts.gc() as collect:
        if run.evaluation_due:
            between_steps(session, saves)
        while run.step < run.last_step and not run.evaluation_due:
            if ends_early(run) or session.stop(run):
                break
            position = run.loader.position
            try:
                with phase("data_wait"):
                    batch = next(run.loader)
                with log.clock:  # device work only, does not wait
                    result = train_step(run, batch, session.drop, phase)
            except Dropped:
                run.loader.seek(position)
                break
            run.step += 1
            if run.step == first + 1:
                expect_steps()
            run.tokens += batch.tokens
            with phase("logging"):
                log.step(batch, result)  # reads back one step late, so logging never stalls
            require_good_steps(run, log)
            between_steps(session, saves)
            with unless_full(run, log):
                log_saves(run, log)
            collect(run.step)
    return run


def between_steps(session: Session, saves: SaveSchedule) -> None:
    """Evaluate, sample and save, whichever is due. A dropped evaluation stays due."""
    run, log = session.run, session.log
    run.evaluation_due = False
    if due(run.config.train.eval_every, run):
        with log.aside("evaluation"):
            try:
                log_evaluation(session)
            except Dropped:
                run.evaluation_due = True
                return
    if due(run.config.train.sample_every, run):
        with log.aside("sample"):
            log_sample(session)
    if saves.due(run):
        with log.aside("checkpoint"), unless_full(run, log):
            save(run, log)


def due(every: int | None, run: Run) -> bool:
    """Return whether work done every `every` steps is due. Never for 0, or at the last step."""
    if not every:
        return False
    return run.step % every == 0 and run.step < run.last_step


def ends_early(run: Run) -> bool:
    """Return whether patience ran out before the last step. All ranks have the same losses."""
    patience = run.config.train.patience
    return run.step < run.last_step and 0 < patience <= run.evaluations_since_best


def eval_tokens(run: Run) -> int | None:
    """Return how many validation tokens each evaluation of the run scores. None means all."""
    train = run.config.train
    return train.eval_tokens if train.eval_every and train.eval_tokens != "all" else None


def log_evaluation(session: Session) -> Evaluation | None:
    """Evaluate, write the record, and save if the loss is the best so far.

    With `checkpoint.best=false` only the last step is saved, so that its checkpoint shows whether
    it is the best.

    Returns: None when there is no validation text.
    Raises: RunFailed when the loss is not finite: the weights are unusable, earlier checkpoints are
            unaffected. Dropped, as `score`. DiskFull at the last step.
    """
    run, log = session.run, session.log
    require_sound(run, log)
    evaluation = score(run, max_tokens=eval_tokens(run), drop=session.drop, progress=log.progress)
    if evaluation is None:
        return None
    log.evaluation(evaluation)
    run.evaluations_since_best += 1
    if run.best_val_loss is None or evaluation.loss < run.best_val_loss:
        run.best_val_loss, run.best_step = evaluation.loss, run.step
        run.evaluations_since_best = 0
        is_last = run.step == run.last_step
        if run.config.checkpoint.best or is_last:
            with stating_room(run) if is_last else unless_full(run, log):
                save(run, log)
    return evaluation


def log_sample(session: Session) -> None:
    """Log a sample on rank 0. With sharded weights, no rank has the whole model.

    A sample that a stop request interrupts is not logged. One that fails, as when the chat template
    rejects its prompt, is reported: the run continues.
    """
    run = session.run
    if session.sample and run.mesh.is_main and run.mesh.device_mesh is None:
        try:
            with run.pulse.during("sampling"), suppress(WorkInterrupted):
                session.log.event("sample", text=session.sample(run))
        except DataError as error:
            session.log.progress.say(f"There is no sample at step {run.step}: {error.what}")
