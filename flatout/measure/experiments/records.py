"""The records of experiments, as JSON has them: a trial, a number, a row of a table. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from flatout.storage.files import Stored

PARTS = ("batch", "checkpointing", "speedups", "prefetch")
"""What `flatout tune` varies. The order is that of the first measurements."""
LEAST_MINUTES = 1.0
"""The shortest time limit of tune: in less, hardly more than the start of one trial fits."""
UNSURE = "unsure: too few repeats"
"""A gain without an interval, which is not shown as a number."""
TIME_WAS_UP, INTERRUPTED = "the time was up", "it was interrupted"
"""Why a point has no trial."""
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
    """Number of first losses to record. The trial runs until it has them."""
    warmup_s: float = 20.0
    """Latest end of the warm-up, counted from the end of the first step."""
    limit_s: float = 300.0
    """Latest end of the steps, whatever has been measured by then."""
    rehearse: list[Rehearsal] = Field([])
    """What a run does besides training and the trial does once, untimed, for its memory."""


class Steps(Stored):
    """The results of a trial's steps, or their medians over repeats."""

    step_ms: float | None = None
    """Mean time of a measured step."""
    data_ms: float | None = None
    """Part of it spent waiting for data."""
    host_ms: float | None = None
    """Part of it spent on the host's work. On a GPU it overlaps with the device's."""
    device_ms: float | None = None
    """Part of it spent on the device's work."""
    peak_gib: float | None = None
    """Peak memory: of the device, or on a CPU of the whole process."""
    rows_per_device: int | None = None
    """Sequences in a micro-batch."""
    accumulate: int | None = None
    """Micro-batches per step."""
    warmup_steps: int | None = None
    """Steps before the measured ones."""


class TrialResult(Steps):
    """The result of one trial."""

    status: Status
    """ok, out-of-memory, failed or timed-out."""
    reason: str | None = None
    """Why it is not ok, as a sentence."""
    tokens_per_s: float | None = None
    """Tokens of all measured steps over their total time, periodic work included.

    Outliers are handled by repeats."""
    losses: list[float] = Field([])
    """Losses of the first steps, in nats per token."""
    warmup_s: float | None = None
    """Seconds of the warm-up."""
    settled: bool | None = None
    """Whether the step time was steady at its end. If not, the results may be too low."""
    measured_steps: int | None = None
    """Steps that were measured."""
    speedups: list[str] = Field([])
    """Speedups that were actually on."""
    compile_s: float | None = None
    """Seconds spent compiling. Null when nothing was compiled."""
    rehearsed: list[Rehearsal] = Field([])
    """What the trial did besides training."""
    environment: dict[str, str | int] = Field({})
    """Device, processor, threads, torch."""
    process_s: float = 0.0
    """Seconds of the whole process, including its start and imports."""

    @property
    def is_ok(self) -> bool:
        """Whether there are results."""
        return self.status == "ok"


class Trial(Stored):
    """One measurement in one process."""

    point: str
    """The set of speedups, the value of a sweep, or the setting."""
    round: int
    """Counted from 0. Points are compared within rounds."""
    seed: int
    """train.seed, the same for all points of a round."""
    result: TrialResult
    """Its results, or why there are none."""
    deterministic: bool = False
    """Whether it ran with train.deterministic=true to check an exact tolerance.

    Only its losses are used. Its other results are in no row."""


class Figure(Stored):
    """A median of repeats, with its interval."""

    median: float
    """Median of the repeats."""
    low: float | None
    """Lower end of the interval. Null with too few repeats."""
    high: float | None
    """Upper end of the interval. Null with too few repeats."""

    def verdict(self, *, left_out: bool = False) -> str:
        """Return a gain in words. For a speedup that was removed, it is what that one is worth."""
        if self.low is None or self.high is None:
            return UNSURE
        if self.low <= 1 <= self.high:
            return "worth nothing measurable" if left_out else "no measurable gain"
        ratio = f"x{self.median:.2f}"
        if self.median > 1:
            return f"worth {ratio}" if left_out else ratio
        return f"{'faster without it' if left_out else 'slower'}, {ratio}"

    def between(self, digits: str) -> str:
        """Return the interval in brackets, or an empty string if it is unknown."""
        if self.low is None or self.high is None:
            return ""
        return f" ({self.low:{digits}} to {self.high:{digits}})"


class LossCheck(Stored):
    """Whether the losses of two points stay within the tolerance."""

    tolerance: str | None = None
    """exact, rounding or statistical. Null if the losses were not compared."""
    within_tolerance: bool | None = None
    """null if it was not decided."""
    tolerance_reason: str | None = None
    """How it was decided, or why not."""
    loss_difference: float | None = None
    """Largest relative difference of a loss from that of `against`, on the same batches."""
    compared_losses: int | None = None
    """Number of first steps whose losses were compared."""
    deterministic: bool = False
    """Whether the losses are from runs with train.deterministic=true.

    They are used where timed runs are not bit-identical."""


class Row(Steps, LossCheck):
    """One line of a table: a set of speedups, a value of a sweep, a change, or what was not run."""

    name: str
    """Name of the set, the value or the change."""
    kind: str
    """baseline, added (one more), leave-one-out or add-one (from or to the full set), point (of a
    sweep), best (of tune), or absent (never measured)."""
    speedup: str | None = None
    """The speedup that it measures."""
    speedups: list[str] = Field([])
    """All speedups that were on."""
    replaced: list[str] = Field([])
    """Speedups of the full set that this one replaces."""
    against: str | None = None
    """The line or the setting that it is compared with."""
    status: str = "ok"
    """ok, out-of-memory, failed, timed-out or not-measured."""
    reason: str | None = None
    """Why it is not ok, or why it has fewer repeats."""
    repeats: int = 0
    """Trials with results."""
    tokens_per_s: Figure | None = None
    """Tokens per second of measured time."""
    gain: Figure | None = None
    """How many times faster with this speedup or change than without it, from paired repeats."""
    verdict: str = ""
    """The gain in words, or why there is none."""

    @property
    def short_name(self) -> str:
        """A short form of the name, such as `batched-muon for bf16-products`."""
        return self.name.removeprefix("all, with ")

    @property
    def is_unreached(self) -> bool:
        """Whether the bench ended before its turn."""
        return self.status == "not-measured" and self.kind != "absent"


class Choice(Row):
    """A change that tune measured."""

    part: str
    """batch, checkpointing, speedups or prefetch."""
    leaves_out: bool
    """Whether it removes the speedup. `gain` is that of removing it."""
    taken: bool
    """Whether tuned.yaml has it."""


class Best(Row):
    """The setting that tuned.yaml states. Its gain is over the first setting, null for that one."""

    prefetch: int
    """Optimizer steps that the data loader reads ahead."""
    precision: str
    """Precision of the matmuls."""
    rehearsed: list[str]
    """What its trials did besides training: evaluation, save."""


class Left(Stored):
    """A speedup or a change that is not measured."""

    name: str
    reason: str
    """Why, as a sentence."""
