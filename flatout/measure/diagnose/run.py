"""The measured run of `diagnose`, in a separate process: preflight, then timed steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from flatout.assembly.run import Run
from flatout.assembly.selection import speedup_named
from flatout.config.schema import RunConfig
from flatout.data.load.loader import DirectLoader, PrefetchLoader, StepBatch
from flatout.errors import FlatoutError
from flatout.measure.child import Answer
from flatout.measure.diagnose.preflight import Prepared, failure_of, prepare
from flatout.measure.diagnose.recorded import series_of
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.runlog import RunLog
from flatout.measure.steps.calls import OperationLines
from flatout.measure.steps.evidence import Evidence, Failure
from flatout.measure.steps.gathering import gathered
from flatout.measure.steps.lines import LineSampler, read_stacks, site_at, user_line
from flatout.measure.steps.machine import gpu_facts
from flatout.measure.steps.windows import Windows
from flatout.measure.trial import QUIET
from flatout.training.checkpoint.catalog import steps_between_saves
from flatout.training.evaluation import score
from flatout.training.loop import fit
from flatout.training.metrics.log import Log
from flatout.training.metrics.observers import Observer
from flatout.training.out_of_memory import explained
from flatout.training.saving import DEFAULT_MINUTES_BETWEEN_SAVES, environment_of
from flatout.training.session import Session
from flatout.training.warmup import warm_up

LONG_RUN_STEPS = 10_000_000
"""The measured run is extended to this length, so that it cannot end before its windows do."""
MIN_STEPS = 5
"""Fewest ordinary steps."""
FEW_STEPS = 2
"""Steps of the windows that mark calls and record operations."""
SCORED_ROWS = 8
"""Micro-batches of the trial evaluation."""


def collect(request: str, answer: Answer) -> None:
    """Answer with what is known before the first step, and then with what the steps show.

    A failure is evidence too: whatever happens, there is a last answer that reports it. A run that
    hangs ends the process.
    """
    spec = MeasureSpec.model_validate_json(request)
    prepared = prepare(spec)
    answer(prepared.evidence)
    if prepared.resolved is None:
        return
    done, thread = threading.Event(), threading.get_ident()

    def report_hang() -> None:
        if done.wait(spec.limit_s):
            return
        message = f"The run did not end within {spec.limit_s:.0f} s."
        site = site_at(user_line(read_stacks().get(thread, ())))
        failure = Failure(kind="hang", message=message, site=site)
        known = {"source": "measured run", "failure": failure}
        answer(prepared.evidence.model_copy(update=known))
        os._exit(0)

    threading.Thread(target=report_hang, daemon=True).start()
    try:
        found = measured(spec, prepared)
    finally:
        done.set()
    answer(found)


def measured(spec: MeasureSpec, prepared: Prepared, callbacks: Sequence[Observer] = ()) -> Evidence:
    """Return the evidence of a measured run. An error of the run is part of it."""
    resolved = prepared.resolved
    assert resolved is not None
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    config = resolved.config.with_values(
        QUIET | {"train.steps": LONG_RUN_STEPS, "schedule.warmup": prepared.warmup_steps}
    )
    run: Run | None = None
    before = prepared.evidence.model_copy(update={"source": "measured run"})
    try:
        run = resolved.build(config, Path(spec.folder))
        with explained(run), Log(run, callbacks) as log:
            log.start()
            warm_up(run, log)
            windows = RunWindows(run, log, spec)
            try:
                fit(Session(run, log, windows.requested))
            finally:
                windows.close()
            gpu = gpu_facts(resolved.machine, config.train.device)
            log.write_pending()
            last = min(windows.last_own_step or run.step, resolved.config.train.steps or run.step)
            own = [one for one in RunLog(run.folder).records() if one["step"] <= last]
            known = {
                **gpu,
                "losses": series_of(own, "train/loss"),
                "grad_norms": series_of(own, "train/grad_norm"),
            }
            before = before.model_copy(update=known)
            return evidence_of(before, run, log, windows, resolved.config)
    except Exception as error:  # whatever the run raises is evidence
        failure = failure_of(error, run.step if run is not None else 0)
        return before.model_copy(update={"failure": failure})
    finally:
        if run is not None:
            run.loader.close()


class RunWindows(Windows):
    """Decides when a measured run stops, and keeps what its windows have measured."""

    def __init__(self, run: Run, log: Log, spec: MeasureSpec) -> None:
        super().__init__(log.clock.timer, str(run.mesh.device))
        self.last_own_step: int | None = None
        """The last step before those with a part replaced, which change the losses too."""
        self.has_compiled = any(d.on and d.name.startswith("compile") for d in run.decisions)
        self._run, self._log, self._spec = run, log, spec
        self._late_s = time.monotonic() + spec.limit_s / 2

    def requested(self, run: Run) -> bool:
        """Return whether the measurement is over. The loop calls it before each step."""
        return not self.start_step()

    def _windows(self) -> Generator[None, None, None]:
        yield from self._until_steady(self._spec.warmup_s)
        with self._sampling(), self.timer.collecting_gc():
            yield from self._ordinary(partial(self._lacks, MIN_STEPS, self._spec.seconds))
        if self._is_late():
            self.notes.append(f"A step takes {self.step_s:.0f} s: only its phases were measured.")
            return
        yield from self._marked_calls(FEW_STEPS)
        if not self.has_compiled:
            with OperationLines() as found:
                yield
            self.sites |= found.lines.sites(1, timed=False)
        yield from self._recorded(FEW_STEPS)
        self.last_own_step = self._run.step
        seconds = self._spec.seconds / 2
        yield from self._counterfactual("synthetic-data", self._fixed_data, seconds=seconds)

    def _lacks(self, at_least: int, seconds: float, steps: int, spent_s: float) -> bool:
        return steps < (min(at_least, 2) if self._is_late() else at_least) or spent_s < seconds

    def _is_late(self) -> bool:
        """Return whether the steps are so slow that what is not measured yet must be omitted."""
        return time.monotonic() > self._late_s

    @contextmanager
    def _fixed_data(self) -> Iterator[None]:
        loader = self._run.loader
        self._run.loader = cast(PrefetchLoader, FixedLoader(loader))
        try:
            yield
        finally:
            self._run.loader = loader


class FixedLoader:
    """A data loader that returns one batch, which is on the device already, again and again."""

    def __init__(self, loader: PrefetchLoader | DirectLoader) -> None:
        self.position, self.steps_per_epoch = loader.position, loader.steps_per_epoch
        self.data_at, self._batch = loader.data_at, next(loader)

    def __next__(self) -> StepBatch:
        return self._batch

    def seek(self, position: int) -> None:
        """Do nothing: every position has the same batch."""


def evidence_of(
    before: Evidence, run: Run, log: Log, windows: RunWindows, planned: RunConfig
) -> Evidence:
    """Return the evidence of a measured run. It saves and evaluates once for this.

    Their times are divided by the steps between them in the run that is `planned`.
    """
    save_s = evaluation_s = None
    sampler = LineSampler(lambda: "checkpoint")
    try:
        with sampler:
            for _ in range(2):  # the second one is like those after it
                run.step += 1  # a step is saved once
                run.saver.save(run, environment=environment_of(run), keep=1)
                run.saver.wait()
                save_s = sum(saved.blocked_s for saved in run.saver.finished())
    except (FlatoutError, OSError) as error:
        windows.notes.append(f"A save could not be measured: {error}")
    if save_s is not None:
        steps = steps_between_saves(planned.checkpoint, run.steps_per_epoch)
        minutes = planned.checkpoint.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES
        save_s /= steps or max(60 * minutes / windows.step_s, 1.0)
    if planned.train.eval_every:  # a part of the validation split stands for all that is scored
        tokens, most = before.val_tokens or 0, planned.train.eval_tokens
        wanted = tokens if most in (None, "all") else min(int(most), tokens)
        few = min(SCORED_ROWS * run.rows_per_device * run.config.data.seq_len, wanted)
        score(run, max_tokens=few, progress=log.progress)  # the next one is like those after it
        start_s = time.perf_counter()
        scored = score(run, max_tokens=few, progress=log.progress)
        if scored is not None:
            evaluation_s = (time.perf_counter() - start_s) * wanted / max(scored.tokens, 1)
            evaluation_s /= planned.train.eval_every
    periodic: dict[str, float | None] = {"checkpoint_s": save_s, "evaluation_s": evaluation_s}
    found = gathered(before, windows, periodic)
    dropped = (d for d in run.decisions if not d.on and d.name in (before.speedups or ()))
    failed = next((d.reason for d in dropped if speedup_named(d.name).compiles), None)
    extra_s = (save_s or 0.0) + (evaluation_s or 0.0)
    tokens_per_s = run.tokens_per_step / windows.step_s
    flops_per_token = run.core.flops_per_token(run.config.data.seq_len)
    flops_per_s = float(flops_per_token.causal_exact) * tokens_per_s
    roofline = {
        "peak_tflops": run.peak and run.peak.tflops,
        "peak_source": run.peak and run.peak.source,
        "achieved_tflops": flops_per_s / 1e12,
        "mfu": log.mfu(flops_per_s),
        "tokens_per_s": tokens_per_s,
    }
    update: dict[str, Any] = {
        "speedups": tuple(run.speedups),
        "compile_fallback": failed,
        "counterfactual_s": {
            name: seconds + extra_s for name, seconds in windows.counterfactual_s.items()
        },
        "sites": {**found.sites, **sampler.sites(1)},
        "peak_gib": log.peak_gib(),
        **roofline,
        "remaining_s": (before.planned_steps or 0) * (found.step_s or 0.0),
    }
    return found.model_copy(update=update)
