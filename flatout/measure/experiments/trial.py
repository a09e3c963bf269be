"""A trial: builds and trains a run with the training code in a separate process, and times it.

There is a result even if that process dies, hangs or prints nonsense. A trial writes only to a
scratch directory.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from flatout.assembly.run import Run
from flatout.config.schema import validate
from flatout.errors import FlatoutError, OutOfMemory
from flatout.hardware.machine import fingerprint
from flatout.measure.child import Answer, ask
from flatout.measure.experiments.records import Rehearsal, Status, TrialResult, TrialSpec
from flatout.measure.experiments.resolving import resolve_here
from flatout.measure.steps.steady import is_steady
from flatout.progress import readable_memory
from flatout.training.evaluation import batch_shapes, score
from flatout.training.loop import fit
from flatout.training.metrics.clocks import TimeBreakdown
from flatout.training.metrics.log import Log, require_finite
from flatout.training.out_of_memory import explained
from flatout.training.saving import closing_saver, reserve, save, wait_for_saves
from flatout.training.session import Session
from flatout.training.step import StepResult
from flatout.training.warmup import warm_up

MIN_RUN_STEPS = 2_000
"""Shorter recipes are extended to this many steps, so that they can warm up and be measured."""
MIN_STEPS = 3
"""Minimum steps of a measurement."""
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


def run_trial(spec: TrialSpec, timeout_s: float, *, command: Sequence[str] = ()) -> TrialResult:
    """Measure in a fresh process, which is killed after `timeout_s`, and return a result.

    `command` replaces the default command, for tests.
    """
    start_s, found = time.monotonic(), list[TrialResult]()

    def on_answer(line: str) -> bool:
        with suppress(ValidationError):
            found.append(TrialResult.model_validate_json(line))
        return True

    ended = ask(f"{__name__}:answer", spec, on_answer, timeout_s=timeout_s, command=command)
    status: Status = "failed"
    reason = (
        f"The process ended with exit code {ended.code} and no result. Its output: "
        f"{ended.last_words}"
    )
    if ended.timed_out:
        status, reason = "timed-out", f"It did not end within {timeout_s:.0f} s."
    elif ended.signal is not None:
        why = ": the usual cause is too little memory" * (ended.signal == "SIGKILL")
        reason = f"The process was killed by {ended.signal}{why}."
    if ended.timed_out or ended.signal or not found:
        found = [TrialResult(status=status, reason=reason)]
    return found[-1].model_copy(update={"process_s": time.monotonic() - start_s})


def answer(request: str, answer: Answer) -> None:
    """Answer a specification with a result."""
    answer(measured(TrialSpec.model_validate_json(request)))


def measured(spec: TrialSpec) -> TrialResult:
    """Measure in this process, and return an error as a result."""
    status: Status = "failed"
    try:
        return measure(spec)
    except FlatoutError as error:
        status, reason = "out-of-memory" if isinstance(error, OutOfMemory) else status, error.what
    except MemoryError:
        status, reason = "out-of-memory", "Out of memory: the machine has no more."
    except Exception as error:  # any failure becomes a row of the table
        first_line = (str(error).splitlines() or [""])[0][:300]
        reason = f"{type(error).__name__}: {first_line}"
        # torch raises a plain RuntimeError when the CPU's memory is exhausted
        if "can't allocate memory" in str(error):
            size = re.search(r"(\d+) bytes", str(error))
            what = f"it tried to allocate {readable_memory(int(size[1]))}." if size else first_line
            status, reason = "out-of-memory", f"Out of memory: {what}"
    return TrialResult(status=status, reason=reason)


def measure(spec: TrialSpec) -> TrialResult:
    """Train for as long as the spec requests, and return the results.

    Raises: OutOfMemory, and whatever building and training raise.
    """
    start_s = time.perf_counter()
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    resolved = resolve_here(validate(spec.config).with_values(QUIET))
    steps = max(resolved.config.train.steps or 0, MIN_RUN_STEPS)
    run = resolved.build(resolved.config.with_values({"train.steps": steps}), Path(spec.folder))
    try:
        with explained(run):
            return _timed(run, spec, start_s)
    finally:
        run.loader.close()


def _timed(run: Run, spec: TrialSpec, start_s: float) -> TrialResult:
    wanted = run.speedups
    run.loader.prime(min(spec.loss_steps, run.last_step))
    with Log(run) as log, closing_saver(run, log):
        warm_up(run, log, eval_shapes=batch_shapes(run) if spec.rehearse else ())
        if spec.rehearse:
            reserve(run, log)
        limit_s = max(spec.limit_s - (time.perf_counter() - start_s), MIN_STEPS_S)
        pace = Pace(log, spec.model_copy(update={"limit_s": limit_s}))
        fit(Session(run, log, pace.requested))
        spent = log.time_breakdown() - pace.before
        rehearsed = _rehearse(run, log, spec.rehearse)
        peak_gib = log.peak_gib()
    losses = [float(one.loss) for one in pace.results if one.num_valid]
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


def _rehearse(run: Run, log: Log, wanted: Sequence[Rehearsal]) -> list[Rehearsal]:
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


class Pace:
    """Decides when a run stops: detects the end of the warm-up, then allows `seconds` of steps.

    During warm-up it waits for every step, so that each has its own time. Measured steps are queued
    as in any run, and are waited for once, at the end. Warm-up ends at the latest `warmup_s`
    seconds after the first step, or after half of `limit_s` or of the run's steps. A trial also
    continues until it has taken `loss_steps` steps. After `limit_s`, counted from its first step,
    three measured steps are enough, and after twice that time, one is.
    """

    def __init__(
        self, log: Log, spec: TrialSpec, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.warmup_steps: int | None = None
        """Steps before the measured ones. None while warming up."""
        self.warmup_s = 0.0
        """Seconds that they took."""
        self.is_steady = False
        """Whether the step time was steady by then."""
        self.before = TimeBreakdown()
        """The time of the warm-up, by activity."""
        self.results: list[StepResult] = []
        """Those of the first `loss_steps` steps, on the device, so that nothing waits for them."""
        self._log, self._spec, self._clock = log, spec, clock
        self._course: Iterator[None] | None = None

    def requested(self, run: Run) -> bool:
        """Return whether the trial is over. The loop calls it before each step."""
        if self._log.last_result and len(self.results) < self._spec.loss_steps:
            self.results.append(self._log.last_result)
        if self._course is None:
            self._course = self._steps(run)
        return next(self._course, self) is self

    def _steps(self, run: Run) -> Iterator[None]:
        log, spec, clock = self._log, self._spec, self._clock
        log.time_breakdown()  # waits for the device
        start_s = last_s = clock()
        step_s: list[float] = []
        is_late = False
        while not self.is_steady and not is_late and len(step_s) < max(run.last_step // 2, 1):
            yield
            log.time_breakdown()
            now_s = clock()
            step_s.append(now_s - last_s)
            self.warmup_s = now_s - start_s
            self.is_steady = is_steady(step_s)
            after_first_s = self.warmup_s - step_s[0]
            is_late = after_first_s >= spec.warmup_s or self.warmup_s >= spec.limit_s / 2
            last_s = clock()  # excludes the time of this check
        self.warmup_steps = len(step_s)
        ahead = int(1.5 * spec.seconds / max(step_s[-1], 1e-6)) + MIN_STEPS
        run.loader.prime(min(max(ahead, spec.loss_steps), run.last_step))
        self.before, began_s = log.time_breakdown(), clock()
        yield
        for steps in range(1, run.last_step):
            now_s = clock()
            is_long_enough = now_s - began_s >= spec.seconds and steps >= MIN_STEPS
            late_s = now_s - start_s - spec.limit_s
            if (
                (is_long_enough and self.warmup_steps + steps >= spec.loss_steps)
                or (late_s >= 0 and steps >= MIN_STEPS)
                or late_s >= spec.limit_s
            ):
                return
            yield
