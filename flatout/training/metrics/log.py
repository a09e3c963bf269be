"""The log of a run: times steps, reads their metrics back, and writes records and events.

A record combines host metrics, taken when the step is queued, with device metrics, read back later.
Evaluation, samples and saves are timed separately, so tokens/s covers training only. `clocks.py`
breaks down the time of a step.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import torch

from flatout.errors import Diverged
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import Json, JsonObject
from flatout.training.metrics.alarms import Alarms
from flatout.training.metrics.bad_steps import BadSteps
from flatout.training.metrics.clocks import (
    Interval,
    StepClock,
)
from flatout.training.metrics.compile_events import Compilations, CompilationWatch
from flatout.training.metrics.device import OtherProcesses, gpu_figures, memory_gib
from flatout.training.metrics.loggers import guarded, reason_of
from flatout.training.metrics.observers import Observer
from flatout.training.run_dir.layout import EVENTS, METRICS, SKIPPED
from flatout.training.run_dir.runlog import DIVERGENCE, Lines, RunLog

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.data.load.loader import StepBatch
    from flatout.training.evaluation import Evaluation
    from flatout.training.step import StepResult

T = TypeVar("T")
TAIL_BYTES = 2**16
"""How much of metrics.jsonl is read for its last loss."""
LOCAL_LOGGERS = ("tensorboard",)
"""Loggers of runs that only measure, such as those of bench."""


LESS_STEEP = (
    "Lower optim.lr or raise schedule.warmup, and start a new run with --run-dir DIR. Earlier "
    "checkpoints are not affected."
)
"""What to do when training has diverged."""


class Rates(NamedTuple):
    """The throughput of all ranks per second of training."""

    tokens_per_s: float
    """Targets, without padding."""
    flops_per_s: float
    """Causal-exact training FLOPs of the tokens."""


class PendingRecord(NamedTuple):
    """A record whose device metrics have not been read back yet."""

    figures: dict[str, float]
    interval: Interval


class Log:
    """Writes a run's records and events on rank 0. Other ranks only keep their clocks.

    A record is due every `log.every` steps and at the last step. `close` writes the pending ones.
    Leaving the context closes the files and the loggers, even after an error. `loggers` names those
    that receive the metrics: a measurement takes part in no project elsewhere.
    """

    def __init__(
        self,
        run: Run,
        observers: Sequence[Observer] = (),
        progress: Progress = SILENT,
        loggers: Sequence[str] = LOCAL_LOGGERS,
    ) -> None:
        self.progress = progress
        """Where the run reports messages to the user."""
        self._run = run
        self._guards = guarded(loggers, self.event) if run.mesh.is_main else ()
        self._watchers = observers if run.mesh.is_main else ()
        self._observers = (*self._watchers, *self._guards)
        self._started_s = time.perf_counter()
        self._elapsed_before_s = run.elapsed_s
        self._interval = Interval(self._started_s)
        self._failed = set[str]()
        self._others = self._beside("the load of other processes", OtherProcesses)
        self._pending: dict[int, PendingRecord] = {}
        self.clock = StepClock(run.mesh.device)
        """Entered around `train_step`."""
        self._flops_per_token = functools.cache(run.flops_per_token)
        """Cached by row length."""
        self.last_result: StepResult | None = None
        """The metrics of the last step, still on the device."""
        self._compilation = CompilationWatch()
        self.compile_s: float | None = None
        """Seconds spent compiling, before and after the first step. None if nothing compiled."""
        self.cached_s = 0.0
        """The part of `compile_s` whose result torch keeps on disk."""
        self.recompiles = 0
        """Graphs compiled after the warm-up."""
        self.first_tokens = run.tokens
        """Tokens that the run had trained on before this process started."""
        self.rates = list[Rates]()
        """The rates of every interval. The first includes the warm-up."""
        self.last_evaluation: tuple[int, Evaluation] | None = None
        """The step and result of the last evaluation that this process recorded."""
        self.bad_steps = BadSteps()
        """The last steps in a row whose updates were skipped, as far as they are known."""
        self._alarms = Alarms(run.folder) if run.mesh.is_main else None
        self.num_alarms = 0
        """Alarms in events.jsonl that this process raised."""
        self._metrics, self._events = Lines(run.folder / METRICS), Lines(run.folder / EVENTS)
        self.metrics_bytes = self._metrics.num_bytes
        """The size of metrics.jsonl up to the last training record: see `truncate_metrics`."""
        self._refused = set[Path]()
        self.train_loss = last_loss(run.folder) if run.mesh.is_main else None
        """The loss in the last record. Other ranks know only the records of this process."""

    @property
    def wall_s(self) -> float:
        """Seconds since this process started to train."""
        return time.perf_counter() - self._started_s

    def start(self) -> None:
        """Tell the observers that the first step is about to start."""
        for observer in self._watchers:
            observer.on_start(self._run)

    def step(self, batch: StepBatch, result: StepResult) -> None:
        """Count the step that was just queued. `run.step` already includes it."""
        run, interval = self._run, self._interval
        interval.steps += 1
        interval.wait_s += 1e-3 * batch.wait_ms
        interval.tokens += batch.tokens
        interval.samples += batch.samples
        interval.flops += batch.tokens * self._flops_per_token(batch.seq_len)
        self.last_result = result
        interval.blocked_s += run.guard.waited_s
        if result.skipped:
            reason = "float16 overflowed: the loss scale is halved, the weights stay unchanged"
            self.event("skip", reason=reason)
        else:
            self.bad_steps.push(run, batch, result)
        due = run.step % run.config.log.every == 0 or run.step == run.last_step
        figures = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            SKIPPED: run.guard.skipped,
        }
        with self.clock.reading():
            run.readback.push(run.step, figures, due=due)
        if due:
            self._pending[run.step] = self._close_interval(result)
        self._write_ready(flush=False)
        self._log_recompilations()
        for observer in self._observers:
            observer.on_tick(run.step, run.last_step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the record of an evaluation.

        Raises: Diverged, on all ranks, when its loss is not finite.
        """
        self.write_pending()
        self._write(self._position() | evaluation.record())
        self._log_recompilations()
        self.last_evaluation = self._run.step, evaluation
        if not math.isfinite(evaluation.loss):
            what = f"The validation loss is {evaluation.loss} at step {self._run.step}"
            self.event(DIVERGENCE, reason=what)
            raise Diverged(f"{what}: training has diverged.", fix=LESS_STEEP)

    def compiled(self, seconds: float) -> None:
        """Log the warm-up's compilations, which took `seconds`. Later ones are recompilations."""
        self._compilations("compiled", round(seconds, 3))

    def _compilations(self, kind: str, seconds: float | None = None) -> Compilations:
        found = self._compilation.poll()
        found = found if seconds is None else replace(found, compile_s=seconds)
        self.compile_s = (self.compile_s or 0.0) + found.compile_s
        self.cached_s += found.cached_s
        self.event(kind, **asdict(found))
        return found

    def event(self, kind: str, /, **fields: Json) -> None:
        """Append a line to events.jsonl and tell the observers."""
        if not self._run.mesh.is_main:
            return
        event: JsonObject = {
            "event": kind,
            "time": time.time(),
            "step": self._run.step,
            "wall_s": round(self.wall_s, 3),
            **fields,
        }
        self.num_alarms += kind == "alarm"
        self._events.append(event)
        self._tell_refusal(self._events)
        for observer in self._observers:
            observer.on_event(event)

    @contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """Exclude the time spent inside from training. Wait first for steps queued on a GPU."""
        self._wait_for_device()
        began_s = time.perf_counter()
        try:
            with self.clock.timer.phase(phase):
                yield
        finally:
            self._interval.aside_s += time.perf_counter() - began_s

    def keep_clock(self) -> None:
        """Update `run.elapsed_s`, before it is saved or summarised."""
        self._run.elapsed_s = self._elapsed_before_s + self.wall_s

    def write_pending(self) -> None:
        """Wait for the last step and write all pending records."""
        self._write_ready(flush=True)

    def close(self) -> None:
        """Write all pending records and close the files."""
        self.write_pending()
        self._close_files()

    def __enter__(self) -> Self:
        """Start the loggers, so that they receive every event."""
        for guard in self._guards:
            guard.on_start(self._run)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        quits = kind is not None and issubclass(kind, KeyboardInterrupt)
        try:
            for guard in self._guards:
                guard.close(wait=not quits)
        finally:
            self._close_files()

    def _close_files(self) -> None:
        for lines in (self._metrics, self._events) if self._run.mesh.is_main else ():
            lines.close()
            if lines.lacks_lines:
                self.progress.say(f"{lines.path} lacks lines that could not be written.")

    def _tell_refusal(self, lines: Lines) -> None:
        """Report once that lines cannot be written, which does not stop the run."""
        if lines.refusal is None or lines.path in self._refused:
            return
        self._refused.add(lines.path)
        text = (
            f"{lines.path} cannot be written ({reason_of(lines.refusal)}). Training continues. Its "
            "lines are written when the disk accepts them."
        )
        self.progress.say(text)
        self.event("refused", text=text)

    def end(self, summary: JsonObject) -> None:
        """Write the summary, which marks the run as finished, and tell the observers.

        Raises: OSError when it cannot be written: the same command then tries again.
        """
        self.event("end", **summary)
        self._events.close()
        if self._events.refusal is not None:
            raise self._events.refusal
        for observer in self._observers:
            observer.on_end(summary)

    def peak_gib(self) -> float | None:
        """Return the peak memory so far: the device's, or this process's on a CPU."""
        found = self._beside("memory", partial(memory_gib, self._run.mesh.device))
        return (found or {}).get("mem/peak_gib")

    def mfu(self, flops_per_s: float) -> float | None:
        """Return the model FLOPs utilisation at `flops_per_s`, causal-exact, over all ranks.

        None when the peak is unknown, or when the result exceeds 1, which means that the peak was
        measured on a busy machine.
        """
        if self._run.peak is None:
            return None
        share = flops_per_s / (self._run.mesh.world_size * self._run.peak.tflops * 1e12)
        return share if share <= 1 else None

    def steady_rates(self) -> Rates | None:
        """Return the median rates after the first interval, or its rates if it is the only one."""
        steady = self.rates[1:] or self.rates
        return Rates(*map(statistics.median, zip(*steady, strict=True))) if steady else None

    @property
    def is_steady(self) -> bool:
        """Whether `steady_rates` omits the first interval, in which everything warms up."""
        return len(self.rates) > 1

    def _log_recompilations(self) -> None:
        """Log recompilations at the step that caused them."""
        if self._compilation.changed():
            self.recompiles += self._compilations("recompiled").graphs

    def _position(self) -> dict[str, float]:
        wall_s = self.wall_s
        return {
            "step": self._run.step,
            "tokens": self._run.tokens,
            "wall_s": round(wall_s, 3),
            "elapsed_s": round(self._elapsed_before_s + wall_s, 3),
        }

    def _wait_for_device(self) -> None:
        if self._run.mesh.device.type == "cuda":
            with self.clock.reading():
                torch.cuda.synchronize(self._run.mesh.device)

    def _close_interval(self, result: StepResult) -> PendingRecord:
        """Start a new interval, and return the host's metrics of the previous one."""
        run, interval = self._run, self._interval
        blocked_s, spans = self.clock.take()
        interval.blocked_s += blocked_s
        interval.spans += spans
        interval.ended_s = time.perf_counter()
        self._interval = Interval(interval.ended_s)
        train_s = interval.train_s
        rates = Rates(interval.tokens / train_s, interval.flops / train_s)
        self.rates.append(rates)
        figures = self._position() | {
            "train/lr": result.learning_rate,
            "train/epoch": run.step / run.steps_per_epoch,
            "perf/tokens_per_s": rates.tokens_per_s,
            "perf/samples_per_s": interval.samples / train_s,
            "perf/steps_per_s": interval.steps / train_s,
        }
        mfu = self.mfu(rates.flops_per_s)
        if mfu is not None:
            figures["perf/mfu"] = mfu
        if run.mesh.is_main:
            figures |= self._beside("memory", partial(memory_gib, run.mesh.device)) or {}
            figures |= self._beside("the GPU's state", partial(gpu_figures, run.mesh.device)) or {}
        if self._others and run.mesh.world_size == 1:  # ranks are other processes to each other
            others = partial(self._others.figures, run.machine.cores)
            figures |= self._beside("the load of other processes", others) or {}
        return PendingRecord(figures, interval)

    def _write_ready(self, *, flush: bool) -> None:
        """Write the records whose device metrics have arrived. With `flush`, wait for all."""
        with self.clock.reading():
            bad_steps = self.bad_steps.ready(flush=flush)
            ready = self._run.readback.ready(flush=flush)
        for bad in bad_steps:
            self.event("bad_step", **bad.event())
            if bad.in_a_row == 1 and self._run.mesh.is_main:  # of several, the user is told one
                self.progress.say(f"Step {bad.step}: {bad.reason}. Its update is skipped.")
        for step, figures in ready:
            if not figures[SKIPPED]:
                del figures[SKIPPED]
            pending = self._pending.pop(step)
            if math.isfinite(figures["train/loss"]):
                self.train_loss = figures["train/loss"]
            self._write(pending.figures | pending.interval.figures() | figures)

    def _write(self, record: Mapping[str, float]) -> None:
        """Write a record without its non-finite metrics, which JSON cannot represent."""
        if self._alarms is None:  # of another rank
            return
        record = {name: value for name, value in record.items() if math.isfinite(value)}
        self._metrics.append(record)
        if "val/loss" not in record:
            self.metrics_bytes = self._metrics.num_bytes
        self._tell_refusal(self._metrics)
        for observer in self._observers:
            observer.on_record(record)
        for alarm in self._beside("alarms", partial(self._alarms.see, record)) or ():
            self.event(alarm.pop("event"), **alarm)

    def _beside(self, what: str, measure: Callable[[], T]) -> T | None:
        """Return what a measurement beside training returns. A failure ends it, not the run."""
        if what in self._failed:
            return None
        try:
            return measure()
        except Exception as error:
            self._failed.add(what)
            reason = f"{type(error).__name__}: {error}"
            self.progress.say(f"Training continues without measuring {what}: {reason}.")
            return None


def last_loss(run_folder: Path) -> float | None:
    """Return the training loss of the last record of a run that has one near its end, or None."""
    records = [*RunLog(run_folder, tail_bytes=TAIL_BYTES).records()]
    return next((one["train/loss"] for one in reversed(records) if "train/loss" in one), None)
