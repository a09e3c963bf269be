"""The windows of a measured run, the work that is not part of every step, and their evidence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch

from flatout.assembly.run import Run
from flatout.assembly.selection import speedup_named
from flatout.config.schema import RunConfig
from flatout.data.load.feed import DirectFeed, PrefetchFeed, StepBatch
from flatout.errors import FlatoutError
from flatout.hardware import usable_cores
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.steps.calls import OperationLines
from flatout.measure.steps.evidence import Evidence
from flatout.measure.steps.gathering import gathered
from flatout.measure.steps.lines import LineSampler
from flatout.measure.steps.windows import Windows
from flatout.training.checkpoint.retention import steps_between_saves
from flatout.training.evaluation import score
from flatout.training.metrics.log import Log
from flatout.training.saving import DEFAULT_MINUTES_BETWEEN_SAVES, environment_of

MIN_STEPS = 5
"""Fewest ordinary steps."""
FEW_STEPS = 2
"""Steps of the windows that mark calls and record operations."""
TURNS = 3
"""Comparisons of steps with and without a replaced part."""
SCORED_ROWS = 8
"""Micro-batches of the trial evaluation."""


class RunWindows(Windows):
    """Decides when a measured run stops, and keeps what its windows have measured."""

    def __init__(self, run: Run, log: Log, spec: MeasureSpec) -> None:
        super().__init__(log.clock.timer, str(run.mesh.device))
        self.last_own_step: int | None = None
        """The last step before those with a part replaced, which change the losses too."""
        self.counterfactual_s: dict[str, float] = {}
        """Seconds of an average step with one thing replaced."""
        self.has_compiled = any(d.on and d.name.startswith("compile") for d in run.decisions)
        self._run, self._spec = run, spec
        self._late_s = time.monotonic() + spec.limit_s / 2
        for optimizer in run.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.timer.enter("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self.timer.leave())

    def requested(self, run: Run) -> bool:
        """Return whether the measurement is over; the loop calls it before each step."""
        return not self.start_step()

    def _windows(self) -> Generator[None, None, None]:
        yield from self._until_steady(self._spec.warmup_s)
        with self._sampling(), self.timer.collecting_gc():
            yield from self._ordinary(partial(self._lacks, MIN_STEPS, self._spec.seconds))
        if self._spec.brief:
            return
        if self._is_late():
            self.notes.append(f"A step takes {self.step_s:.0f} s: only its phases were measured.")
            return
        yield from self._marked_calls(FEW_STEPS)
        if not self.has_compiled:
            self.lines = OperationLines()
            with self.lines:
                yield
        yield from self._recorded(FEW_STEPS)
        self.last_own_step = self._run.step
        yield from self._counterfactual("synthetic-data", self._fixed_data)
        cores = usable_cores()
        if not self.on_gpu and torch.get_num_threads() < cores:
            yield from self._counterfactual("all-threads", partial(_threads, cores))

    def _lacks(self, at_least: int, seconds: float, steps: int, spent_s: float) -> bool:
        return steps < (min(at_least, 2) if self._is_late() else at_least) or spent_s < seconds

    def _is_late(self) -> bool:
        """Return whether the steps are so slow that what is not measured yet must be left out."""
        return time.monotonic() > self._late_s

    def _counterfactual(
        self, name: str, replaced: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Measure steps with a part replaced, in turns with ordinary steps.

        The median of their ratios counts, so that a machine that becomes slower does not.
        """
        self.name = name
        ratios: list[float] = []
        for _ in range(TURNS):
            if self._is_late():
                break
            with replaced():
                yield
                other_s = yield from self._timed()
            ratios.append(other_s / (yield from self._timed()))
        if ratios:
            self.counterfactual_s[name] = statistics.median(ratios) * self.step_s

    def _timed(self) -> Generator[None, None, float]:
        """Take some steps and return the seconds of one."""
        self._wait()
        start_s, steps = time.perf_counter(), 0
        seconds = self._spec.seconds / (4 * TURNS)
        while self._lacks(2, seconds, steps, time.perf_counter() - start_s):
            yield
            steps += 1
        self._wait()
        return (time.perf_counter() - start_s) / steps

    @contextmanager
    def _fixed_data(self) -> Iterator[None]:
        feed = self._run.feed
        self._run.feed = cast(PrefetchFeed, FixedFeed(feed))
        try:
            yield
        finally:
            self._run.feed = feed


class FixedFeed:
    """A feed that returns one batch, which is on the device already, again and again."""

    def __init__(self, feed: PrefetchFeed | DirectFeed) -> None:
        self.position, self.steps_per_epoch = feed.position, feed.steps_per_epoch
        self.data_at, self._batch = feed.data_at, next(feed)

    def __next__(self) -> StepBatch:
        return self._batch

    def seek(self, position: int) -> None:
        """Do nothing: every position has the same batch."""


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evidence_of(
    before: Evidence, run: Run, log: Log, windows: RunWindows, planned: RunConfig
) -> Evidence:
    """Return the evidence of a measured run; it saves and evaluates once for this.

    Their times are divided by the steps between them in the run that is `planned`.
    """
    save_s = evaluation_s = None
    sampler = LineSampler(lambda: "checkpoint")
    try:
        with sampler:
            save_s = _save(run) / _steps_between_saves(run, planned, windows.step_s)
    except (FlatoutError, OSError) as error:
        windows.notes.append(f"A save could not be measured: {error}")
    if planned.train.eval_every:
        evaluation_s = _evaluation(run, log, planned, before.data.val_tokens or 0)
    periodic: dict[str, float | None] = {"checkpoint_s": save_s, "evaluation_s": evaluation_s}
    found = gathered(before, windows, periodic)
    dropped = [d for d in run.decisions if not d.on and d.name in (before.speedups or ())]
    failed = [d for d in dropped if speedup_named(d.name).compiles]
    extra_s = (save_s or 0.0) + (evaluation_s or 0.0)
    tokens_per_s = run.tokens_per_step / windows.step_s
    flops = float(run.core.flops_per_token(run.config.data.seq_len).causal_exact)
    achieved, peak = flops * tokens_per_s / 1e12, run.peak
    share = None if peak is None else achieved / peak.tflops
    roof = {
        "peak_tflops": None if peak is None else peak.tflops,
        "peak_source": None if peak is None else peak.source,
        "achieved_tflops": achieved,
        "mfu": share if share is not None and share <= 1 else None,
        "tokens_per_s": tokens_per_s,
    }
    update: dict[str, Any] = {
        "speedups": tuple(d.name for d in run.decisions if d.on),
        "compile_fallback": failed[0].reason if failed else None,
        "counterfactual_s": {
            name: seconds + extra_s for name, seconds in windows.counterfactual_s.items()
        },
        "sites": {**found.sites, **sampler.sites(1)},
        "memory": before.memory.model_copy(update={"peak_gib": log.peak_gib()}),
        "roof": before.roof.model_copy(update=roof),
        "remaining_s": (before.planned_steps or 0) * (found.step_s or 0.0),
    }
    return found.model_copy(update=update)


def _save(run: Run) -> float:
    """Return the seconds for which a save blocks the loop; the second one, which is like the rest.

    Raises: FlatoutError, OSError when the disk refuses it.
    """
    blocked_s = 0.0
    for _ in range(2):
        run.step += 1  # a step is saved once
        run.saver.save(run, environment=environment_of(run), keep=1)
        run.saver.wait()
        blocked_s = sum(saved.blocked_s for saved in run.saver.finished())
    return blocked_s


def _steps_between_saves(run: Run, planned: RunConfig, step_s: float) -> float:
    steps = steps_between_saves(planned.checkpoint, run.steps_per_epoch)
    minutes = planned.checkpoint.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES
    return steps or max(60 * minutes / step_s, 1.0)


def _evaluation(run: Run, log: Log, planned: RunConfig, tokens: int) -> float | None:
    """Return the seconds of evaluation per step, from a part of the validation split."""
    wanted = (
        tokens if planned.train.eval_tokens == "all" else min(planned.train.eval_tokens, tokens)
    )
    few = SCORED_ROWS * run.rows_per_device * run.config.data.seq_len
    start_s = time.perf_counter()
    found = score(run, max_tokens=min(few, wanted), progress=log.progress)
    if found is None:
        return None
    seconds = time.perf_counter() - start_s
    return seconds * wanted / max(found.tokens, 1) / planned.train.eval_every
