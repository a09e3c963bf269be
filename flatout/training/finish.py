"""The end of a run: the last state saved, the whole validation split scored, a sample, the summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.assembly.run import Run
from flatout.hardware import Peak, peak_tflops
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.read_write import weights_sha256
from flatout.training.evaluation import Evaluation, score
from flatout.training.loop import (
    draw_sample,
    ends_early,
    eval_tokens,
    keep_last,
    settle_saves,
    take_evaluation,
)
from flatout.training.metrics.log import Log
from flatout.training.run_dir import layout

Drop = Callable[[Run, int], bool]


def finish(
    run: Run,
    log: Log,
    sample: Callable[[Run], str] | None,
    progress: Progress = SILENT,
    *,
    drop: Drop | None = None,
) -> dict[str, Any]:
    """Save, evaluate on the whole validation split, sample, write the summary and return it. Every
    rank calls it.

    Raises: EvaluationDropped when `drop`, asked between the batches of the evaluation, says yes;
            the state is saved by then.
    """
    if reason := why_early(run):
        log.event("early_stop", reason=reason)
        progress.say(reason)
    with log.aside():
        keep_last(
            run, log, progress=progress
        )  # first: a signal during the evaluation must not cost the last steps
        evaluation = last_evaluation(run, log, progress, drop)
        settle_saves(run, log, progress=progress)
        draw_sample(run, log, sample)
    log.close()
    log.keep_clock()
    summary = summarise(run, log, evaluation)
    if run.mesh.is_main:
        log.event("end", **summary)
        layout.write_summary(run.folder, summary)
    return summary


def last_evaluation(
    run: Run, log: Log, progress: Progress, drop: Drop | None = None
) -> Evaluation | None:
    """Score the whole validation text, if there is any; where the run scored a part of it, that
    part first, for the best checkpoint.

    A run that ends early has just scored that part, or all of it; what was scored whole at the last
    step is not scored again.
    """
    if (
        eval_tokens(run) is None
        and log.last_evaluation is not None
        and log.last_evaluation[0] == run.step
    ):
        return log.last_evaluation[1]
    if not ends_early(run):
        max_tokens = eval_tokens(run) if run.config.train.eval_every else None
        found = take_evaluation(run, log, max_tokens=max_tokens, drop=drop, progress=progress)
        if found is None or eval_tokens(run) is None or not run.config.train.eval_every:
            return found
    whole = score(run, drop=drop, progress=progress)  # not a record: the curve is that of the part
    if whole is not None:
        log.event("evaluation", loss=whole.loss, tokens=whole.tokens)
    return whole


def why_early(run: Run) -> str | None:
    """Return why the run ends before its last step, None when it does not."""
    if not ends_early(run):
        return None
    best = f"best {run.best_val_loss:.4f} at step {run.best_step}"
    return f"No better validation loss in {run.config.train.patience} evaluations: {best}, over at step {run.step} of {run.last_step}."


def summarise(run: Run, log: Log, evaluation: Evaluation | None) -> dict[str, Any]:
    """Return what the run came to: all of it measured, what was not is None."""
    wall_s = log.wall_s
    run.peak = best_peak(run, log)
    steady = log.steady_rates()
    mfu = log.mfu(steady.flops_per_s) if steady else None
    tokens_here = run.tokens - log.first_tokens
    digest = (
        weights_sha256(catalog.checkpoint_path(run.folder, run.step)) if run.mesh.is_main else ""
    )
    return {
        "run": str(run.folder),
        "steps": run.step,
        "tokens": run.tokens,
        "train_loss": log.train_loss,
        "val_loss": evaluation.loss if evaluation else None,
        "best_val_loss": run.best_val_loss,
        "best_step": run.best_step,
        "bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        "by_dataset": [split.to_dict() for split in evaluation.by_dataset] if evaluation else [],
        "stopped_early": ends_early(run),
        "stopped_because": why_early(run),
        "tokens_per_s": steady.tokens_per_s if steady else None,
        "wall_tokens_per_s": tokens_here / wall_s if tokens_here else None,
        "mfu": mfu,
        "mfu_of": run.peak.source if run.peak and mfu else _why_unknown(run),
        "peak_gib": log.peak_gib(),
        "compile_s": log.compile_s,
        "recompiles": None if log.compile_s is None else log.recompiles,
        "wall_s": wall_s,
        "elapsed_s": run.elapsed_s,
        "resumed_from": run.resumed_from,
        "weights_sha256": run.mesh.broadcast_object(digest),
    }


def best_peak(run: Run, log: Log) -> Peak | None:
    """Return the run's peak; one that was measured is measured again, and the better counts: a busy
    machine looks slow.
    """
    if run.peak is None or not run.peak.source.startswith("measured"):
        return run.peak
    again = peak_tflops(run.machine, str(run.mesh.device), run.arithmetic)
    if again is None or again.tflops <= run.peak.tflops:
        return run.peak
    log.event("peak", tflops=again.tflops, source=again.source, before_tflops=run.peak.tflops)
    return Peak(
        again.tflops,
        f"{again.source}, at the end" if again.tflops > 1.1 * run.peak.tflops else again.source,
    )


def _why_unknown(run: Run) -> str:
    if run.peak is None:
        return "unknown: no data sheet has this device's rate, and it cannot be measured with a plain matrix product"
    return f"unknown: training was faster than the roof ({run.peak.source}), so that was measured while the machine was busy"
