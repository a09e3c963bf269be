"""The work of a trial: builds and trains a run with the training code, and times it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flatout.assembly.build import build
from flatout.assembly.run import Run
from flatout.config.schema import validate
from flatout.hardware import fingerprint
from flatout.measure.pace import Pace
from flatout.measure.resolving import resolve_here
from flatout.measure.spec import TrialResult, TrialSpec
from flatout.parallel.mesh import make_mesh
from flatout.training.loop import fit
from flatout.training.metrics.log import Log, require_finite
from flatout.training.out_of_memory import explained
from flatout.training.warmup import warm_up

MIN_RUN_STEPS = 2_000
"""Shorter recipes are extended to this many steps, so that they can warm up and be measured."""
MIN_STEPS_S = 1.0
"""Minimum time for the steps of a trial, however long it took to start."""
QUIET = {
    "train.eval_every": 0,
    "train.patience": 0,
    "train.sample_every": 0,
    "checkpoint.every_minutes": 1e9,
}
"""Switches off everything but training."""


class FirstLosses:
    """A run's readback that also keeps the first losses, on the device so that nothing waits."""

    def __init__(self, readback: Any, count: int) -> None:
        self._readback, self._count = readback, count
        self._losses: list[torch.Tensor] = []

    def push(self, step: int, values: Mapping[str, torch.Tensor], *, due: bool) -> None:
        """Keep the loss of `step` if it is among the first, and forward all figures."""
        if len(self._losses) < self._count:
            self._losses.append(values["train/loss"])
        self._readback.push(step, values, due=due)

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the figures that the run's readback has read."""
        found: list[tuple[int, dict[str, float]]] = self._readback.ready(flush=flush)
        return found

    def losses(self) -> list[float]:
        """Return the losses, waiting for the device."""
        return [float(loss) for loss in self._losses]


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
    mesh = make_mesh(config.parallel, config.train.device)
    run = build(
        config,
        machine=resolved.machine,
        mesh=mesh,
        dataset=resolved.dataset,
        folder=Path(spec.folder),
        decisions=resolved.decisions,
    )
    try:
        with explained(run):
            return timed(run, spec, start_s)
    finally:
        run.feed.close()


def timed(run: Run, spec: TrialSpec, start_s: float) -> TrialResult:
    """Warm up the run, train it, and return the figures."""
    losses = run.readback = FirstLosses(run.readback, spec.loss_steps)
    wanted = {decision.name for decision in run.decisions if decision.on}
    run.feed.prime(min(spec.loss_steps, run.last_step))
    with Log(run) as log:
        warm_up(run, log)
        limit_s = max(spec.limit_s - (time.perf_counter() - start_s), MIN_STEPS_S)
        pace = Pace(
            log,
            seconds=spec.seconds,
            loss_steps=spec.loss_steps,
            warmup_s=spec.warmup_s,
            limit_s=limit_s,
        )
        fit(run, log, pace)
        pace.finish()
        spent = pace.measured
        peak_gib = log.peak_gib()
    first = losses.losses()
    for step, loss in enumerate(first, 1):
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
        losses=first,
        warmup_steps=pace.warmup_steps,
        warmup_s=pace.warmup_s,
        settled=pace.is_steady,
        measured_steps=spent.steps,
        rows_per_device=run.rows_per_device,
        accumulate=run.config.batch.accumulate,
        speedups=[decision.name for decision in run.decisions if decision.on],
        environment=fingerprint(str(run.mesh.device)),
    )
