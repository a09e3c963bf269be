"""Where the time of a training step goes: data wait, device work, other host work.

On a CPU the device is the host, and the three add up to the step. On a GPU, host and device work
concurrently, a step takes as long as the slower of the two, and timing makes neither wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flatout.training.metrics.phases import PhaseTimer

Span = Callable[[], float]
"""Returns the device time in seconds of one step, which must have finished."""


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


@dataclass
class Interval:
    """The steps since the last record."""

    started_s: float
    ended_s: float = math.inf
    steps: int = 0
    wait_s: float = 0.0
    """Time that the host spent waiting for data."""
    aside_s: float = 0.0
    """Time spent on evaluation, samples and saves, which is not training."""
    blocked_s: float = 0.0
    """Time that the host spent waiting for the device: steps on a CPU, readbacks on a GPU."""
    tokens: int = 0
    samples: int = 0
    flops: float = 0.0
    """Causal-exact training FLOPs of the tokens."""
    spans: list[Span] = field(default_factory=list)
    """Device work, one span per step."""

    @property
    def train_s(self) -> float:
        """Seconds of training, once it has ended."""
        return max(self.ended_s - self.started_s - self.aside_s, 1e-9)

    def figures(self) -> dict[str, float]:
        """Return the means per step, under their names in metrics.jsonl.

        The device's are those of `spans`, whose steps finished before the last readback. The host's
        is what remains: queueing kernels (on a GPU), the loop, logging.
        """
        seconds = {
            "step": self.train_s,
            "data_wait": self.wait_s,
            "host": max(self.train_s - self.wait_s - self.blocked_s, 0.0),
            "device": sum(span() for span in self.spans),
        }
        return {f"perf/{name}_ms": 1e3 * total_s / self.steps for name, total_s in seconds.items()}
