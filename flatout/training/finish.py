"""The end of a run: the last save, the final evaluation, a sample, the summary."""

from __future__ import annotations

from flatout.assembly.run import Run
from flatout.progress import counted
from flatout.storage.json_io import JsonObject
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.contents import digest_of
from flatout.training.evaluation import Evaluation, score
from flatout.training.loop import (
    Session,
    ends_early,
    eval_tokens,
    log_evaluation,
    log_sample,
)
from flatout.training.metrics.log import Log
from flatout.training.saving import require_own, save_last, stating_room, wait_for_saves


def finish(session: Session) -> JsonObject:
    """Save, evaluate on the whole validation split, sample, and return the summary.

    Every rank calls it.
    Raises: Dropped when `session.drop`, called between the evaluation's batches, returns
            True. The state is saved by then. DiskFull when the last step, or that it is the best,
            cannot be saved. The run is then not complete, and the same command tries again.
    """
    run, log = session.run, session.log
    if reason := early_stop_reason(run):
        log.event("early_stop", reason=reason)
        log.progress.say(reason)
    with log.aside("finish"):
        save_last(run, log)  # a signal during the evaluation must not lose the last steps
        evaluation = final_evaluation(session)
        with stating_room(run):  # without room the step is saved, and the next run evaluates again
            wait_for_saves(run, log)
        log_sample(session)
    require_own(run)
    log.close()
    log.keep_clock()
    return summarise(run, log, evaluation)


def final_evaluation(session: Session) -> Evaluation | None:
    """Score the whole validation split. None when there is no validation text.

    If this run's evaluations score only the start of the split, that part is scored first, to
    find the best checkpoint, unless the run ends early: its last evaluation just did so. A whole
    split that was scored at the last step is not scored again.
    """
    run, log = session.run, session.log
    is_partial = eval_tokens(run) is not None
    if not is_partial and log.last_evaluation and log.last_evaluation[0] == run.step:
        return log.last_evaluation[1]
    if not ends_early(run):
        evaluation = log_evaluation(session)
        if evaluation is None or not is_partial:
            return evaluation
    evaluation = score(run, drop=session.drop, progress=log.progress)
    if evaluation is not None:  # not a record: the curve shows the loss on the start of the split
        log.event("evaluation", loss=evaluation.loss, tokens=evaluation.tokens)
    return evaluation


def early_stop_reason(run: Run) -> str | None:
    """Return why the run ends before its last step. None when it does not."""
    if not ends_early(run):
        return None
    return (
        f"No better validation loss in {counted(run.config.train.patience, 'evaluation')}: "
        f"best {run.best_val_loss:.4f} at step {run.best_step}, "
        f"stopped at step {run.step} of {run.last_step}."
    )


def summarise(run: Run, log: Log, evaluation: Evaluation | None) -> JsonObject:
    """Return the run's results. Anything not measured is None."""
    wall_s = log.wall_s
    steady = log.steady_rates()
    mfu = log.mfu(steady.flops_per_s) if steady else None
    mfu_of = "unknown: there is no data sheet for this device, and its peak cannot be measured"
    if run.peak and mfu:
        mfu_of = run.peak.source
    elif run.peak:
        mfu_of = (
            f"unknown: training was faster than the peak ({run.peak.source}), "
            "which must have been measured while the machine was busy"
        )
    tokens_here = run.tokens - log.first_tokens
    return {
        "run": str(run.folder),
        "steps": run.step,
        "tokens": run.tokens,
        "train_loss": log.train_loss,
        "val_loss": evaluation.loss if evaluation else None,
        "best_val_loss": run.best_val_loss,
        "best_step": run.best_step,
        "evaluations_since_best": run.evaluations_since_best,
        "bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        "by_dataset": [split.to_dict() for split in evaluation.by_dataset] if evaluation else [],
        "stopped_early": ends_early(run),
        "stopped_because": early_stop_reason(run),
        "tokens_per_s": steady.tokens_per_s if steady else None,
        "wall_tokens_per_s": tokens_here / wall_s if tokens_here else None,
        "mfu": mfu,
        "mfu_of": mfu_of,
        "peak_gib": log.peak_gib(),
        "compile_s": log.compile_s,
        "recompiles": None if log.compile_s is None else log.recompiles,
        "skipped_steps": int(run.guard.skipped),
        "alarms": log.num_alarms,
        "wall_s": wall_s,
        "elapsed_s": run.elapsed_s,
        "resumed_from": run.resumed_from,
        "weights_sha256": run.mesh.broadcast_object(
            digest_of(catalog.checkpoint_path(run.folder, run.step)) if run.mesh.is_main else ""
        ),
    }
