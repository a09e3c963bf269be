"""What `verify --resume` found, and its text. No torch."""

from __future__ import annotations

from flatout.json_io import Stored
from flatout.progress import readable_size


class Sizes(Stored):
    """The largest differences between two runs."""

    tensors: float
    """Of an element of a weight or of optimizer state."""
    figures: float
    """Of a recorded figure, such as a loss."""


class ResumeProof(Stored):
    """The comparison of a run that was stopped and resumed with one that was not."""

    steps_before: int
    """Steps before the stop."""
    steps_after: int
    """Steps after it."""
    device: str
    """The device."""
    deterministic: bool
    """Whether every kernel sums in a fixed order: on a CPU, or with train.deterministic."""
    is_equal: bool
    """Whether every bit is equal."""
    tensors: int
    """Tensors compared: weights, buffers and optimizer state."""
    bytes: int
    """Their size."""
    values: int
    """Values compared: random states, position in the data, counters, learning rates."""
    figures: int
    """Recorded figures compared: losses, gradient norms, learning rates, token counts."""
    first_step: int | None
    """The first step after which something differs."""
    first_tensor: str | None
    """The first tensor that differs, at the stop or else at the end."""
    differences: list[str]
    """One sentence each, the first ones."""
    largest: Sizes | None
    """How large the differences are; null when there are none."""
    noise: Sizes | None
    """How much two runs without a stop differ; null unless it was measured."""
    excluded: str | None
    """What is excluded from the comparison, and why; null when nothing is."""
    causes: list[str]
    """The usual causes of the difference, each with its fix."""

    @property
    def holds(self) -> bool:
        """Whether stopping and resuming changes nothing, except for what is excluded."""
        return self.is_equal or self.excluded is not None

    def text(self) -> str:
        """Return the proof for a person."""
        first, after = self.steps_before, self.steps_after
        runs = f"{first} + {after} steps with a stop between them"
        compared = (
            f"Compared: {self.tensors:,} tensors of weights and optimizer state "
            f"({readable_size(self.bytes)}) at the stop and at the end, "
            f"{self.values:,} values (random states, position in the data, counters), "
            f"{self.figures:,} recorded figures."
        )
        if self.is_equal:
            equal = f"{runs} equal {first + after} steps in every bit, on {self.device}."
            open_ = (
                [
                    "train.deterministic=false: kernels may sum in another order another time; "
                    "here they did not."
                ]
                if not self.deterministic
                else []
            )
            return "\n".join(["Resuming is exact.", equal, compared, *open_])
        if self.excluded is not None:
            verdict = "Resuming is exact, except for the order of sums."
        else:
            verdict = "Resuming is not exact."
        lines = [
            verdict,
            f"{runs} differ from {first + after} steps, first after step {self.first_step}, on "
            f"{self.device}.",
            *self.differences,
            *([self.excluded] if self.excluded else []),
            compared,
        ]
        return "\n".join([*lines, *(f"Possible cause: {cause}" for cause in self.causes)])
