"""The specification and the result of a trial; both pass between processes as JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from flatout.json_io import Stored

Status = Literal["ok", "out-of-memory", "failed", "timed-out"]
Rehearsal = Literal["evaluation", "save"]


class TrialSpec(Stored):
    """The specification of one trial."""

    config: dict[str, Any]
    """The requested configuration, with explicit speedups."""
    folder: str
    """Scratch directory for the files of the run."""
    seconds: float = 5.0
    """Seconds of measured steps, after the warm-up."""
    loss_steps: int = 20
    """Number of first losses to record; the trial runs until it has them."""
    warmup_s: float = 20.0
    """Latest end of the warm-up, counted from the end of the first step."""
    limit_s: float = 300.0
    """Latest end of the steps, whatever has been measured by then."""
    rehearse: list[Rehearsal] = Field([])
    """What a run does besides training and the trial does once, untimed, for its memory."""


class TrialResult(Stored):
    """The result of one trial."""

    status: Status
    """ok, out-of-memory, failed or timed-out."""
    reason: str | None = None
    """Why it is not ok, as a sentence."""
    tokens_per_s: float | None = None
    """Tokens of all measured steps over their total time, periodic work included.

    Outliers are handled by repeats."""
    step_ms: float | None = None
    """Mean time of a measured step."""
    data_ms: float | None = None
    """Part of it spent waiting for data."""
    host_ms: float | None = None
    """Part of it spent on the host's work; on a GPU it overlaps with the device's."""
    device_ms: float | None = None
    """Part of it spent on the device's work."""
    peak_gib: float | None = None
    """Peak memory: of the device, or on a CPU of the whole process."""
    losses: list[float] = Field([])
    """Losses of the first steps, in nats per token."""
    warmup_steps: int | None = None
    """Steps before the measured ones."""
    warmup_s: float | None = None
    """Seconds that they took."""
    settled: bool | None = None
    """Whether the step time was steady by then; if not, the figures may be too low."""
    measured_steps: int | None = None
    """Steps that were measured."""
    rows_per_device: int | None = None
    """Sequences in a micro-batch."""
    accumulate: int | None = None
    """Micro-batches per step."""
    speedups: list[str] = Field([])
    """Speedups that were actually on."""
    compile_s: float | None = None
    """Seconds spent compiling; null when nothing was compiled."""
    rehearsed: list[Rehearsal] = Field([])
    """What the trial did besides training."""
    environment: dict[str, str | int] = Field({})
    """Device, processor, threads, torch."""
    process_s: float = 0.0
    """Seconds of the whole process, including its start and imports."""

    @property
    def is_ok(self) -> bool:
        """Whether there are figures."""
        return self.status == "ok"
