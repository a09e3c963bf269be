"""Where the time of a training step goes: data wait, device work, other host work.

On a CPU the device is the host, and the three add up to the step. On a GPU, host and device work
concurrently, a step takes as long as the slower of the two, and timing makes neither wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flatout.training.metrics.phases import PhaseTimer

Span = Callable[[], float]
"""Returns the device time in seconds of one step, which must have finished."""


@dataclass(frozen=True)
class TimeBreakdown:
    """Where the time of a number of steps went, in seconds summed over the steps."""

    steps: int = 0
    train_s: float = 0.0
    """Wall-clock time of training."""
    wait_s: float = 0.0
    """Time that the host spent waiting for data."""
    blocked_s: float = 0.0
    """Time that the host spent waiting for the device: steps on a CPU, readbacks on a GPU."""
    device_s: float = 0.0
    """Time that the device spent on steps."""

    @property
    def host_s(self) -> float:
        """Time of host work: queueing kernels (on a GPU), the loop, logging."""
        return max(self.train_s - self.wait_s - self.blocked_s, 0.0)

    def step_figures(self) -> dict[str, float]:
        """Return the means per step, under their names in metrics.jsonl."""
        seconds = {
            "step": self.train_s,
            "data_wait": self.wait_s,
            "host": self.host_s,
            "device": self.device_s,
        }
        return {f"perf/{name}_ms": 1e3 * total_s / self.steps for name, total_s in seconds.items()}


class StepClock:
    """Times device work and the host's waits for it. Wraps `train_step` as a context.

    On a CPU the whole step is device work. That costs under 2 us per step. On a GPU there is one
    event on the stream before each step and one after, without waiting. A GPU that idles because
    the host queues too slowly therefore counts as busy. `perf/host_ms` is then close to
    `perf/step_ms`. The same happens when the launch queue is full, so `perf/host_ms` is an upper
    bound on the time that the host needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.timer = PhaseTimer()
        """Times the phases of the loop on the host: data_wait, compute, logging and others."""
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._blocked_s = self._began_s = 0.0
        self._spans: list[Span] = []

    def __enter__(self) -> None:
        """Start timing a step."""
        self.timer.enter("compute")
        if self._stream is None:
            self._began_s = time.perf_counter()
        else:
            self._begin = self._event(self._stream)

    def __exit__(self, *_: object) -> None:
        """Stop timing the step."""
        self.timer.leave_if_open("compute")
        if self._stream is None:
            elapsed_s = time.perf_counter() - self._began_s
            self._blocked_s += elapsed_s
            self._spans.append(lambda: elapsed_s)
        else:
            begin, end = self._begin, self._event(self._stream)
            self._spans.append(lambda: 1e-3 * float(begin.elapsed_time(end)))

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time inside as waiting for a GPU. A CPU's metrics are here already."""
        began_s = time.perf_counter()
        yield
        if self._stream is not None:
            self._blocked_s += time.perf_counter() - began_s

    def take(self) -> tuple[float, list[Span]]:
        """Return the host's blocked seconds and the steps' spans since the previous call."""
        taken = self._blocked_s, self._spans
        self._blocked_s, self._spans = 0.0, []
        return taken


def device_seconds(spans: Iterable[Span]) -> float:
    """Return the device seconds of `spans`. Their steps finished before the last readback."""
    return sum(span() for span in spans)


@dataclass
class Interval:
    """The steps since the last record."""

    started_s: float
    steps: int = 0
    wait_ms: float = 0.0
    aside_s: float = 0.0
    """Time spent on evaluation, samples and saves, which is not training."""
    blocked_s: float = 0.0
    tokens: int = 0
    samples: int = 0
    flops: float = 0.0
    """Causal-exact training FLOPs of the tokens."""
    spans: list[Span] = field(default_factory=list)
    """Device work, one span per step."""

    def train_s(self, now_s: float) -> float:
        """Return the seconds of training in the interval."""
        return max(now_s - self.started_s - self.aside_s, 1e-9)

    def host_times(self, now_s: float) -> TimeBreakdown:
        """Return the breakdown as the host knows it, without the device time."""
        return TimeBreakdown(self.steps, self.train_s(now_s), self.wait_ms * 1e-3, self.blocked_s)
