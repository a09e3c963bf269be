"""Skips the update of a step with bad values, so that weights and optimizer state keep every bit.

A step is bad when its loss or its gradient norm is not finite. All ranks have the same values, so
all skip the same steps. The schedule and the position in the data advance as after any step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.storage.json_io import JsonObject


class StepGuard:
    """Decides on the device which updates to skip, and counts them.

    Cost: a dozen operations on single numbers per step. Nothing waits for the device.
    """

    def __init__(
        self,
        *,
        most: int = 10,
        model: nn.Module | None = None,
        device: torch.device | None = None,
    ) -> None:
        """After `most` bad steps in a row every step is skipped, until the caller stops the run.

        A bad step leaves the buffers of `model` as they were, which forward passes may change.
        """
        self.most = most
        self.streak = torch.zeros((), device=device)
        """Updates skipped in a row, up to the last step. A new tensor at each step."""
        self.skipped = torch.zeros((), device=device)
        """All updates skipped in the run. A new tensor at each step."""
        self.waited_s = 0.0
        """Seconds that the host waited for the device in the last step, to know what to skip."""
        self._model = model
        self._before: list[Tensor] = []

    @cached_property
    def _places(self) -> list[tuple[nn.Module, str]]:
        """The modules and names of the buffers that a checkpoint stores."""
        return [
            (module, name)
            for module in (self._model.modules() if self._model is not None else ())
            for name, _ in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]

    @property
    def buffers(self) -> list[Tensor]:
        """These buffers. A forward pass may have assigned other tensors.

        Shapes: any.
        """
        return [getattr(module, name) for module, name in self._places]

    def begin(self) -> None:
        """Copy the buffers before passes that change them. Most models have none."""
        self.waited_s = 0.0
        self._before = [buffer.detach().clone() for buffer in self.buffers]

    @torch.no_grad()
    def undo(self) -> None:
        """Give the buffers the values that they had at `begin`."""
        for buffer, before in zip(self.buffers, self._before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor, num_valid: Tensor) -> Tensor:
        """Count a step, and return 1 if its update must be skipped, 0 otherwise.

        A step without a valid target has neither loss nor gradient: it is skipped and not counted.

        Shapes: loss, grad_norm, num_valid and the result are 0-D.
        """
        empty = num_valid == 0
        bad = ~torch.isfinite(loss + grad_norm) & ~empty
        bad |= self.streak >= self.most
        counts = bad.to(self.streak.dtype)
        self.streak = torch.where(empty & ~bad, self.streak, (self.streak + 1) * counts)
        self.skipped = self.skipped + counts
        skip = bad | empty
        for buffer, before in zip(self.buffers, self._before, strict=False):
            buffer.copy_(torch.where(skip, before, buffer))
        return skip.to(self.streak.dtype)

    def state_dict(self) -> JsonObject:
        """Return the state that a resumed run needs, as plain numbers. Waits for the device."""
        return {"streak": int(self.streak), "skipped": int(self.skipped)}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore a state that `state_dict` returned, possibly under a different limit."""
        self.streak = torch.full_like(self.streak, min(int(state["streak"]), self.most - 1))
        self.skipped = torch.full_like(self.skipped, int(state["skipped"]))


def step_unless(skip: Tensor, optimizers: Sequence[Optimizer]) -> float:
    """Take the step of every optimizer, or of none when `skip` is 1.

    On a GPU the optimizers read the flag on the device. If one of them cannot, the host waits for
    it, once per step, until the backward pass is done.

    Shapes:  skip is 0-D.
    Returns: seconds that the host waited for a device.
    """
    if not skip.is_cpu and all(map(reads_flag, optimizers)):
        for optimizer in optimizers:
            step_with_flag(optimizer, skip)
        return 0.0
    began_s = time.perf_counter()
    is_skipped = bool(skip)
    waited_s = time.perf_counter() - began_s
    for optimizer in () if is_skipped else optimizers:
        optimizer.step()
    return 0.0 if skip.is_cpu else waited_s


def step_with_flag(optimizer: Optimizer, skip: Tensor) -> None:
    """Take a step that changes nothing when `skip` is 1, of an optimizer for which `reads_flag`.

    Shapes: skip is 0-D.
    """
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def reads_flag(optimizer: Optimizer) -> bool:
    """Return whether a step of an optimizer changes nothing if its attribute `found_inf` is 1.

    The protocol is torch's, for its loss scaler (`torch.amp.GradScaler`): an optimizer that follows
    it declares that by an attribute. Ours do, and torch's fused ones.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
