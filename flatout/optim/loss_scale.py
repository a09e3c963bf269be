"""Dynamic loss scaling for float16.

The loss is multiplied by a scale so that small gradients do not underflow. The gradients are
divided by it before they are clipped. A step whose gradients are not finite is skipped and the
scale is halved. After `growth_interval` finite steps in a row the scale doubles.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST, LARGEST = 1.0, 2.0**24


@dataclass
class LossScaler:
    """The scale, and the number of consecutive finite steps."""

    scale: float
    growth_interval: int = 2_000
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Update the scale after a step whose gradients were finite or not."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, SMALLEST)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = min(self.scale * 2, LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        """Return the state that a resumed run needs, as plain numbers."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a state that `state_dict` returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
