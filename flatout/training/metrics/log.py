"""What a run measures about itself: metrics.jsonl, TensorBoard, and the observers, all from one
record.

A record is host figures taken when a step is queued, joined with device figures when they have been
read back. Time spent on evaluation, samples and saves is measured apart, so that tokens/s means
training; `clocks.py` says where the rest of a step goes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from flatout.errors import RunFailed
from flatout.files import open_own, write_text
from flatout.training.metrics.board import Board
from flatout.training.metrics.clocks import Spent, Window, step_clock
from flatout.training.metrics.compile_events import CompilationWatch
from flatout.training.metrics.observers import Observer
from flatout.training.run_dir.layout import BOARD, METRICS, append_event

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.data.load.feed import StepBatch
    from flatout.training.evaluation import Evaluation
    from flatout.training.step import StepResult

GIB = 2**30


class Rates(NamedTuple):
    """What all ranks get through in a second of training."""

    tokens_per_s: float
    """Targets; padding does not count."""
    flops_per_s: float
    """What they cost, causal-exact."""


@dataclass(frozen=True)
class Waiting:
    """A record whose device figures are still being read back."""

    figures: dict[str, float]
    spent: Spent
    spans: list[Any]


class Log:
    """Writes a run's figures on its main rank; on the others it only keeps their clocks.

    Every `log.every` steps, and at the last one, a record is due. `close` flushes what is still
    being read back; leaving the context closes the files, whatever happened.
    """

    def __init__(self, run: Run, observers: Sequence[Observer] = ()) -> None:
        self._run = run
        self._observers = observers if run.mesh.is_main else ()
        self._started_s = time.perf_counter()
        self._elapsed_before_s = run.elapsed_s
        self._window = Window(self._started_s)
        self._waiting: dict[int, Waiting] = {}
        self._past = Spent()
        self.train_loss: float | None = None
        """Of the last record; known on the main rank alone until this process has written one."""
        self._metrics = self._open_metrics() if run.mesh.is_main else None
        self._board: Board | None = None
        self.clock: Any = step_clock(run.mesh.device)
        """Entered around `train_step`."""
        self._flops_per_token: dict[int, float] = {}
        """By the length of a row."""
        self._last: StepResult | None = None
        self._compilation = CompilationWatch()
        self.compile_s: float | None = None
        """Seconds that compiling took, before the first step and after; None when nothing was
        compiled.
        """
        self.recompiles = 0
        """Graphs that were compiled after the warm-up."""
        self.first_tokens = run.tokens
        """Tokens of the run before this process."""
        self.steady: list[Rates] = []
        """Of every window but the first, which holds the warm-up."""
        self.curve: list[tuple[int, float]] = []
        """(step, training loss) of every record of this process."""
        self.first_window: Rates | None = None
        self.last_evaluation: tuple[int, Evaluation] | None = None
        """The step of this process's last evaluation record, and what was found."""
        if run.mesh.is_main:
            self._board = Board(run.folder / BOARD, run.step, self._board_failed)

    @property
    def wall_s(self) -> float:
        """Seconds since this process began to train."""
        return time.perf_counter() - self._started_s

    def step(self, batch: StepBatch, result: StepResult) -> None:
        """Take note of the step just queued; `run.step` already counts it."""
        run, window = self._run, self._window
        window.steps += 1
        window.wait_ms += batch.wait_ms
        window.tokens += batch.tokens
        window.samples += batch.samples
        window.flops += batch.tokens * self._flops_of(batch.seq_len)
        self._last = result
        if result.skipped:
            self.event(
                "skip", reason="float16 overflowed: the loss scale is halved, the weights stay"
            )
        due = run.step % run.config.log.every == 0 or run.step == run.last_step
        figures = {"train/loss": result.loss, "train/grad_norm": result.grad_norm}
        with self.clock.reading():
            run.readback.push(run.step, figures, due=due)
        if due:
            self._waiting[run.step] = self._close_window(result)
        self._read_back(flush=False)
        self._note_compilations()
        for observer in self._observers:
            observer.on_tick(run.step, run.last_step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write a record of one evaluation."""
        self._read_back(flush=True)
        self._write(self._position() | evaluation.record())
        self._note_compilations()
        self.last_evaluation = self._run.step, evaluation

    def compiled(self, seconds: float) -> None:
        """Take note of what the warm-up compiled, in how many seconds; whatever is compiled from
        now on was not foreseen.
        """
        found = self._compilation.look()
        self.compile_s = seconds
        self.event("compiled", **asdict(found) | {"compile_s": round(seconds, 3)})

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl and tell the observers."""
        if not self._run.mesh.is_main:
            return
        event = append_event(
            self._run.folder,
            kind,
            **{"step": self._run.step, "wall_s": round(self.wall_s, 3), **fields},
        )
        for observer in self._observers:
            observer.on_event(event)

    def _board_failed(self, error: OSError) -> None:
        self.event("no_tensorboard", reason=error.strerror or str(error))

    def _note_compilations(self) -> None:
        """Name what was compiled since the warm-up, at the step at which it was."""
        if not self._compilation.changed():
            return
        found = self._compilation.look()
        self.compile_s = (self.compile_s or 0.0) + found.compile_s
        self.recompiles += found.graphs
        self.event("recompiled", **asdict(found))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep what is done inside out of the training clock; steps that are still queued on a GPU
        belong to training.
        """
        self._wait_for_device()
        begun_s = time.perf_counter()
        yield
        self._window.aside_s += time.perf_counter() - begun_s

    def require_finite(self) -> None:
        """Do nothing when the last step's loss and gradient were numbers; waits for the step.

        Raises: RunFailed when they were not.
        """
        if self._last is None:
            return
        figures = (
            {"training loss": self._last.loss}
            if self._run.scaler
            else {"training loss": self._last.loss, "gradient norm": self._last.grad_norm}
        )
        for name, figure in figures.items():
            if not math.isfinite(value := float(figure)):
                raise diverged(name, value, self._run.step)

    def keep_clock(self) -> None:
        """Bring `run.elapsed_s` up to now, as a checkpoint needs it."""
        self._run.elapsed_s = self._elapsed_before_s + self.wall_s

    def write_pending(self) -> None:
        """Write the records of all steps so far; waits for the last one.

        Raises: RunFailed when the training loss of one of them is not a number.
        """
        self._read_back(flush=True)

    def close(self) -> None:
        """Write what is still being read back, and close the files."""
        self._read_back(flush=True)
        self._close_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_files()

    def _close_files(self) -> None:
        if self._metrics:
            self._metrics.close()
        if self._board:
            self._board.close()

    def start(self) -> None:
        """Tell the observers that the first step comes next."""
        for observer in self._observers:
            observer.on_start(self._run)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell the observers that the run is over."""
        for observer in self._observers:
            observer.on_end(summary)

    def spent(self) -> Spent:
        """Return where the time of all steps of this process went, from the log's beginning to now.
        Waits for the device.
        """
        self._wait_for_device()
        self._read_back(flush=True)
        self._gather()
        open_window = self._window.spent(time.perf_counter())
        return self._past + replace(open_window, device_s=self.clock.seconds(self._window.spans))

    def peak_gib(self) -> float | None:
        """Return the most memory used so far: the device's, or this process's own on a CPU."""
        return memory_gib(self._run.mesh.device).get("mem/peak_gib")

    def _open_metrics(self) -> Any:
        """Open metrics.jsonl for appending, without the lines past the step that was resumed from."""
        path = self._run.folder / METRICS
        if path.exists():
            with os.fdopen(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
                kept = [
                    line for line in file.read().splitlines() if _step_of(line) <= self._run.step
                ]
            write_text(path, "".join(line + "\n" for line in kept))
            losses = [
                record["train/loss"] for record in map(json.loads, kept) if "train/loss" in record
            ]
            self.train_loss = losses[-1] if losses else None
        return os.fdopen(
            open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8"
        )

    def _position(self) -> dict[str, float]:
        run = self._run
        return {
            "step": run.step,
            "tokens": run.tokens,
            "wall_s": round(self.wall_s, 3),
            "elapsed_s": round(self._elapsed_before_s + self.wall_s, 3),
        }

    def _wait_for_device(self) -> None:
        if self._run.mesh.device.type == "cuda":
            with self.clock.reading():
                torch.cuda.synchronize(self._run.mesh.device)

    def _gather(self) -> None:
        """Take what the clock has counted into the window."""
        blocked_s, spans = self.clock.take()
        self._window.blocked_s += blocked_s
        self._window.spans += spans

    def _close_window(self, result: StepResult) -> Waiting:
        """Begin another window, and return what the host knows about this one."""
        self._gather()
        run, window, now_s = self._run, self._window, time.perf_counter()
        seconds, steps = window.train_s(now_s), window.steps
        rates = Rates(window.tokens / seconds, window.flops / seconds)
        if self.first_window is None:
            self.first_window = rates
        else:
            self.steady.append(rates)
        figures = self._position() | {
            "train/lr": result.learning_rate,
            "train/epoch": run.step / run.steps_per_epoch,
            "perf/tokens_per_s": rates.tokens_per_s,
            "perf/samples_per_s": window.samples / seconds,
            "perf/steps_per_s": steps / seconds,
        }
        mfu = self.mfu(rates.flops_per_s)
        if mfu is not None:
            figures["perf/mfu"] = mfu
        if run.mesh.is_main:
            figures |= memory_gib(run.mesh.device) | gpu_figures(run.mesh.device)
        self._window = Window(now_s)
        return Waiting(figures, window.spent(now_s), window.spans)

    def _flops_of(self, seq_len: int) -> float:
        """Return the causal-exact training FLOPs of a token in a row of `seq_len`."""
        if seq_len not in self._flops_per_token:
            self._flops_per_token[seq_len] = float(
                self._run.core.flops_per_token(seq_len).causal_exact
            )
        return self._flops_per_token[seq_len]

    def mfu(self, flops_per_s: float) -> float | None:
        """Return the share of the peak that `flops_per_s` is, of the model's own causal-exact FLOPs
        over all ranks.

        None when no peak is known, or when the share is above 1: then the peak was measured while
        the machine was busy.
        """
        if self._run.peak is None:
            return None
        share = flops_per_s / (self._run.mesh.world_size * self._run.peak.tflops * 1e12)
        return share if share <= 1 else None

    def steady_rates(self) -> Rates | None:
        """Return the medians over the windows after the first, or the first's own where there is no
        other.
        """
        return (
            Rates(*map(statistics.median, zip(*self.steady, strict=True)))
            if self.steady
            else self.first_window
        )

    def _read_back(self, *, flush: bool) -> None:
        """Write the records whose device figures have arrived; with `flush`, wait for all."""
        with self.clock.reading():
            ready = self._run.readback.ready(flush=flush)
        for step, figures in ready:
            waiting = self._waiting.pop(step)
            spent = replace(waiting.spent, device_s=self.clock.seconds(waiting.spans))
            self._past += spent
            record = waiting.figures | spent.step_figures() | figures
            self.train_loss = figures["train/loss"]
            self.curve.append((step, self.train_loss))
            self._write(record)
            if not math.isfinite(self.train_loss):
                raise diverged("training loss", self.train_loss, step)

    def _write(self, record: dict[str, float]) -> None:
        record = {
            name: value for name, value in record.items() if math.isfinite(value)
        }  # JSON has no infinity
        if not self._metrics:
            return
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._board:
            self._board.write(
                int(record["step"]), {name: value for name, value in record.items() if "/" in name}
            )
        for observer in self._observers:
            observer.on_record(record)


def diverged(what: str, value: float, step: int) -> RunFailed:
    """Return the error for a run whose figures are no longer numbers. Every rank has the same
    figures, so every rank raises it.
    """
    return RunFailed(
        f"The {what} is {value} at step {step}: training has diverged.",
        fix="Lower optim.lr or raise schedule.warmup, and start another run with --run DIR; the checkpoints saved before are from before.",
    )


def memory_gib(device: torch.device) -> dict[str, float]:
    """Return the device's memory figures; on a CPU the process's own peak."""
    if device.type == "cuda":
        return {
            "mem/allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "mem/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "mem/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        }
    return {"mem/peak_gib": process_peak_bytes() / GIB}


def process_peak_bytes() -> int:
    """Return the most memory that this process has had resident: macOS counts it in bytes, other
    systems in KiB.
    """
    unit_bytes = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def gpu_figures(device: torch.device) -> dict[str, float]:
    """Return the GPU's utilisation and power as far as its driver tells them; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    import pynvml

    found = {}
    for name, measure, unit in (
        ("gpu/util_pct", torch.cuda.utilization, 1.0),
        ("gpu/power_w", torch.cuda.power_draw, 1e-3),
    ):
        try:
            found[name] = measure(device) * unit
        except (pynvml.NVMLError, RuntimeError):
            continue  # virtual and partitioned GPUs do not tell; what was not measured is left out
    return found


def _step_of(line: str) -> float:
    """Return a metrics line's step; a line that a crash cut short belongs after every step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
