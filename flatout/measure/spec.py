"""What a trial is told, and what it answers: both pass between processes as JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["ok", "out-of-memory", "failed", "timed-out"]


class TrialSpec(BaseModel):
    """What one trial does."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    config: dict[str, Any]
    """The configuration as it is asked for, with its speedups stated."""
    folder: str
    """Scratch folder for what a run writes."""
    seconds: float = 5.0
    """How long steps are measured, after the warm-up."""
    loss_steps: int = 20
    """How many first losses are kept; the trial goes on until it has them."""
    warmup_s: float = 20.0
    """When warming up ends at the latest, counted from the end of the first step."""
    limit_s: float = 300.0
    """When the steps end at the latest, whatever has been measured."""


class TrialResult(BaseModel):
    """What one trial came to."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    status: Status
    """ok; out-of-memory; failed; timed-out."""
    reason: str | None = None
    """Why it is not ok, as a sentence."""
    tokens_per_s: float | None = None
    """Tokens of all measured steps over their whole time: what happens every so many steps is in
    it. Repeats take care of outliers.
    """
    step_ms: float | None = None
    """Mean time of a measured step."""
    data_ms: float | None = None
    """Of it, waiting for data."""
    host_ms: float | None = None
    """Of it, what the host needed for itself; on a GPU it overlaps with the device's work."""
    device_ms: float | None = None
    """Of it, the device's work."""
    peak_gib: float | None = None
    """Most memory used: the device's, or the whole process's on a CPU."""
    losses: list[float] = []
    """Loss of each of the first steps, in nats a token."""
    warmup_steps: int | None = None
    """Steps before the measured ones."""
    warmup_s: float | None = None
    """Seconds that they took."""
    settled: bool | None = None
    """Whether the step time stood still by then; false: the time for it was up, and the figures may
    be too low.
    """
    measured_steps: int | None = None
    """Steps that were measured."""
    rows_per_device: int | None = None
    """Windows of one micro-batch."""
    accumulate: int | None = None
    """Micro-batches of a step."""
    speedups: list[str] = []
    """Speedups that were really on."""
    environment: dict[str, str | int] = {}
    """Device, processor, threads, torch."""
    process_s: float = 0.0
    """Seconds of the whole process, its start and its imports included."""

    @property
    def is_ok(self) -> bool:
        """Whether there are figures."""
        return self.status == "ok"
