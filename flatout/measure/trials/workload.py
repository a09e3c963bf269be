"""The work of a trial: builds and trains a run with the training code, and times it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from flatout.assembly.run import Run
from flatout.config.schema import validate
from flatout.hardware import fingerprint
from flatout.measure.trials.pace import Pace
from flatout.measure.trials.resolving import resolve_here
from flatout.measure.trials.spec import Rehearsal, TrialResult, TrialSpec
from flatout.training.evaluation import batch_shapes, score
from flatout.training.loop import fit
from flatout.training.metrics.log import Log, require_finite
from flatout.training.out_of_memory import explained
from flatout.training.saving import closing_saver, reserve, save, wait_for_saves
from flatout.training.session import Session
from flatout.training.warmup import warm_up

MIN_RUN_STEPS = 2_000
"""Shorter recipes are extended to this many steps, so that they can warm up and be measured."""
MIN_STEPS_S = 1.0
"""Minimum time for the steps of a trial, however long it took to start."""
SPARE_DISK = 3
"""A save is rehearsed where the disk has room for this multiple of the weights and the optimizer's
state.
"""
QUIET = {
    "train.eval_every": 0,
    "train.patience": 0,
    "train.sample_every": 0,
    "checkpoint.every_minutes": 1e9,
}
"""Switches off everything but training."""


def measure(spec: TrialSpec) -> TrialResult:
    """Train for as long as the spec says, and return the figures.

    Raises: OutOfMemory, and whatever building and training raise.
    """
    start_s = time.perf_counter()
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    resolved = resolve_here(validate(spec.config).with_values(QUIET))
    config = resolved.config.with_values(
        {"train.steps": max(resolved.config.train.steps or 0, MIN_RUN_STEPS)}
    )
    run = resolved.build(config, Path(spec.folder))
    try:
        with explained(run):
            return timed(run, spec, start_s)
    finally:
        run.feed.close()


def timed(run: Run, spec: TrialSpec, start_s: float) -> TrialResult:
    """Warm up the run, train it, and return the figures."""
    wanted = run.speedups
    run.feed.prime(min(spec.loss_steps, run.last_step))
    with Log(run) as log, closing_saver(run, log):
        warm_up(run, log, eval_shapes=batch_shapes(run) if spec.rehearse else ())
        if spec.rehearse:
            reserve(run, log)
        limit_s = max(spec.limit_s - (time.perf_counter() - start_s), MIN_STEPS_S)
        pace = Pace(
            log,
            seconds=spec.seconds,
            loss_steps=spec.loss_steps,
            warmup_s=spec.warmup_s,
            limit_s=limit_s,
        )
        fit(Session(run, log, pace.requested))
        pace.finish()
        spent = pace.measured
        rehearsed = rehearse(run, log, spec.rehearse)
        peak_gib = log.peak_gib()
    losses = [float(loss) for loss in pace.losses]
    for step, loss in enumerate(losses, 1):
        require_finite("training loss", loss, step)
    dropped = [
        decision for decision in run.decisions if decision.name in wanted and not decision.on
    ]
    figures = spent.step_figures()
    return TrialResult(
        status="failed" if dropped else "ok",
        reason=f"{dropped[0].name}: {dropped[0].reason}." if dropped else None,
        tokens_per_s=spent.tokens / spent.train_s,
        step_ms=figures["perf/step_ms"],
        data_ms=figures["perf/data_wait_ms"],
        host_ms=figures["perf/host_ms"],
        device_ms=figures["perf/device_ms"],
        peak_gib=peak_gib,
        losses=losses,
        warmup_steps=pace.warmup_steps,
        warmup_s=pace.warmup_s,
        settled=pace.is_steady,
        measured_steps=spent.steps,
        rows_per_device=run.rows_per_device,
        accumulate=run.config.batch.accumulate,
        speedups=run.speedups,
        compile_s=log.compile_s,
        rehearsed=rehearsed,
        environment=fingerprint(str(run.mesh.device)),
    )


def rehearse(run: Run, log: Log, wanted: Sequence[Rehearsal]) -> list[Rehearsal]:
    """Evaluate one batch and save once, as `wanted`, and return what was done.

    Without validation text there is no evaluation, and a small disk gets no checkpoint.
    """
    done: list[Rehearsal] = []
    batch_tokens = run.rows_per_device * run.config.data.seq_len
    if "evaluation" in wanted and score(run, max_tokens=batch_tokens) is not None:
        done.append("evaluation")
    state_bytes = 12 * sum(parameter.numel() for parameter in run.core.parameters())
    if "save" in wanted and shutil.disk_usage(run.folder).free > SPARE_DISK * state_bytes:
        save(run, log)
        wait_for_saves(run, log)
        done.append("save")
    return done
