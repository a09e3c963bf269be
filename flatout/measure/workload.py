"""A trial at work: the run of a recipe, built and trained by the functions that training itself
uses, and timed.
"""

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
from flatout.measure.settling import settle
from flatout.measure.spec import TrialResult, TrialSpec
from flatout.parallel.mesh import make_mesh
from flatout.training.loop import fit
from flatout.training.metrics.log import Log, require_finite
from flatout.training.out_of_memory import explained
from flatout.training.warmup import warm_up

FEWEST_RUN_STEPS = 2_000
"""A recipe that is shorter is stretched to this in a trial, so that it can warm up and be measured.
"""
LEAST_S = 1.0
"""A trial has this long for its steps, whatever it took to begin: one cold step says nothing."""
QUIET = {
    "train.eval_every": 0,
    "train.patience": 0,
    "train.sample_every": 0,
    "checkpoint.every_minutes": 1e9,
}
"""A trial trains, and nothing else."""


class FirstLosses:
    """A run's readback, which keeps the first losses as they pass: still on the device, so nothing
    waits for them.
    """

    def __init__(self, readback: Any, most: int) -> None:
        self._readback, self._most = readback, most
        self._losses: list[torch.Tensor] = []

    def push(self, step: int, values: Mapping[str, torch.Tensor], *, due: bool) -> None:
        """Keep the loss of `step` if it is among the first, and pass all figures on."""
        if len(self._losses) < self._most:
            self._losses.append(values["train/loss"])
        self._readback.push(step, values, due=due)

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return what the run's own readback has read."""
        found: list[tuple[int, dict[str, float]]] = self._readback.ready(flush=flush)
        return found

    def losses(self) -> list[float]:
        """Return the losses; waits for the device."""
        return [float(loss) for loss in self._losses]


def measure(spec: TrialSpec) -> TrialResult:
    """Train for as long as the spec says, and return the figures.

    Raises: RunFailed when the memory does not suffice, and whatever building and training raise.
    """
    began_s = time.perf_counter()
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    settled = settle(validate(spec.config).with_values(QUIET))
    config = settled.config.with_values(
        {"train.steps": max(settled.config.train.steps or 0, FEWEST_RUN_STEPS)}
    )
    mesh = make_mesh(config.parallel, config.train.device)
    run = build(
        config,
        machine=settled.machine,
        mesh=mesh,
        dataset=settled.dataset,
        folder=Path(spec.folder),
        decisions=settled.decisions,
    )
    try:
        with explained(run):
            return timed(run, spec, began_s)
    finally:
        run.feed.close()


def timed(run: Run, spec: TrialSpec, began_s: float) -> TrialResult:
    """Warm the run up, train it at its pace, and return the figures."""
    losses = run.readback = FirstLosses(run.readback, spec.loss_steps)
    wanted = {decision.name for decision in run.decisions if decision.on}
    run.feed.prime(min(spec.loss_steps, run.last_step))
    with Log(run) as log:
        warm_up(run, log)
        limit_s = max(spec.limit_s - (time.perf_counter() - began_s), LEAST_S)
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
        settled=pace.is_settled,
        measured_steps=spent.steps,
        rows_per_device=run.rows_per_device,
        accumulate=run.config.batch.accumulate,
        speedups=[decision.name for decision in run.decisions if decision.on],
        environment=fingerprint(str(run.mesh.device)),
    )
