"""Where a step's time goes: waiting for data, the device's work, the rest of the host's.

On a CPU the device is the host, and the three add up to the step. On a GPU host and device work at
the same time; what a step takes is the longer of the two, and nothing here makes either wait for
the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch


@dataclass(frozen=True)
class Spent:
    """Where the time of some steps went, in seconds over all of them."""

    steps: int = 0
    train_s: float = 0.0
    """Wall time of training."""
    wait_s: float = 0.0
    """The host waited for data."""
    blocked_s: float = 0.0
    """The host waited for the device: for the step's work itself on a CPU, for figures to be read
    back on a GPU.
    """
    device_s: float = 0.0
    """The device was at a step's work."""
    tokens: int = 0
    """Targets of the steps, padding not counted."""

    @property
    def host_s(self) -> float:
        """What the host needed for itself: queueing the work (on a GPU), the loop, logging."""
        return max(self.train_s - self.wait_s - self.blocked_s, 0.0)

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Spent)))

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Spent)))

    def step_figures(self) -> dict[str, float]:
        """Return the means a step under the names of metrics.jsonl."""
        seconds = {
            "step": self.train_s,
            "data_wait": self.wait_s,
            "host": self.host_s,
            "device": self.device_s,
        }
        return {f"perf/{name}_ms": 1e3 * total_s / self.steps for name, total_s in seconds.items()}


class CpuClock:
    """Times the steps' work on a CPU: entered around `train_step`, since the device is the host.
    Under 2 microseconds a step in all.
    """

    def __init__(self) -> None:
        self._spans_s: list[float] = []
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spans_s.append(time.perf_counter() - self._began_s)

    def reading(self) -> AbstractContextManager[None]:
        """Return a context for reading figures back, which waits for nothing here."""
        return nullcontext()

    def take(self) -> tuple[float, list[float]]:
        """Return the seconds the host was blocked and the steps' spans, since the last call."""
        spans, self._spans_s = self._spans_s, []
        return sum(spans), spans

    def seconds(self, spans: list[float]) -> float:
        """Return the device's seconds in `spans`."""
        return sum(spans)


class CudaClock:
    """Times the steps' work on a GPU: from an event before it to one after it on the stream.
    Nothing waits for them.

    So a GPU that idles because the host queues too slowly counts as at work; `perf/host_ms` then
    comes near `perf/step_ms`. So it does when the queue of launches is full: `perf/host_ms` is the
    most that the host may have needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._blocked_s = 0.0
        self._begin = self._event()

    def __enter__(self) -> None:
        self._begin = self._event()
        self._begin.record(self._stream)

    def __exit__(self, *_: object) -> None:
        end = self._event()
        end.record(self._stream)
        self._spans.append((self._begin, end))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count what is spent inside as waiting for the device."""
        began_s = time.perf_counter()
        yield
        self._blocked_s += time.perf_counter() - began_s

    def take(self) -> tuple[float, list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
        """Return the seconds the host was blocked and the steps' spans, since the last call."""
        taken = self._blocked_s, self._spans
        self._blocked_s, self._spans = 0.0, []
        return taken

    def seconds(self, spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        """Return the device's seconds in `spans`, all of whose steps have ended: a later readback
        has waited for them.
        """
        return 1e-3 * sum(float(begin.elapsed_time(end)) for begin, end in spans)

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass
class Window:
    """Steps since the last record."""

    started_s: float
    steps: int = 0
    wait_ms: float = 0.0
    aside_s: float = 0.0
    blocked_s: float = 0.0
    tokens: int = 0
    samples: int = 0
    flops: float = 0.0
    """What the tokens cost, causal-exact."""
    spans: list[Any] = field(default_factory=list)
    """The device's work, a span a step, in its clock's own terms."""

    def train_s(self, now_s: float) -> float:
        """Seconds of training in the window: what was spent aside does not count."""
        return max(now_s - self.started_s - self.aside_s, 1e-9)

    def spent(self, now_s: float) -> Spent:
        """Return where the window's time went, as far as the host knows it: all but the device's
        own.
        """
        return Spent(
            self.steps, self.train_s(now_s), self.wait_ms * 1e-3, self.blocked_s, tokens=self.tokens
        )


def step_clock(device: torch.device) -> CpuClock | CudaClock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
