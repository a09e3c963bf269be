"""What `verify --resume` found, and its text. No torch."""

from __future__ import annotations

from flatout.progress import readable_size
from flatout.storage.files import Stored

FIXED = (
    "Checking with train.deterministic=true: without it kernels of a GPU sum in no fixed order, "
    "and any two runs differ in the last bits."
)


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
    made_deterministic: bool = False
    """Whether train.deterministic was set only for this check."""
    is_equal: bool
    """Whether every bit is equal."""
    tensors: int
    """Tensors compared: weights, buffers and optimizer state."""
    bytes: int
    """Their size."""
    values: int
    """Values compared: random states, position in the data, counters, learning rates."""
    figures: int
    """Recorded values compared: losses, gradient norms, learning rates, token counts."""
    first_step: int | None
    """The first step after which something differs."""
    first_tensor: str | None
    """The first tensor that differs, at the stop or else at the end."""
    differences: list[str]
    """One sentence each, the first ones."""
    causes: list[str]
    """The usual causes of the difference, each with its fix."""

    def text(self) -> str:
        """Return the proof for a person."""
        first, after = self.steps_before, self.steps_after
        runs = f"{first} + {after} steps with a stop between them"
        compared = (
            f"Compared: {self.tensors:,} tensors of weights and optimizer state "
            f"({readable_size(self.bytes)}) at the stop and at the end, "
            f"{self.values:,} values (random states, position in the data, counters), "
            f"{self.figures:,} recorded values."
        )
        compared += f"\n{FIXED.replace('Checking', 'Checked')}" * self.made_deterministic
        if self.is_equal:
            equal = f"{runs} equal {first + after} steps in every bit, on {self.device}."
            lines = ["Resuming is exact.", equal, compared]
            if not self.deterministic:
                lines.append(
                    "train.deterministic=false: kernels may sum in a different order in another "
                    "run. Here they did not."
                )
            return "\n".join(lines)
        lines = [
            "Resuming is not exact.",
            f"{runs} differ from {first + after} steps, first after step {self.first_step}, on "
            f"{self.device}.",
            *self.differences,
            compared,
        ]
        return "\n".join([*lines, *(f"Possible cause: {cause}" for cause in self.causes)])
