"""Undo a dropped step: restore random generators and buffers to their state before it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from flatout.assembly.run import Run


class StepStart:
    """A copy, made before a step, of the state that forward and backward passes change.

    Contains the generators in `state.STATE` and the model's persistent buffers; weights and
    optimizers change only at the end of a step. Cost: about 30 microseconds of host time, and a
    queued copy of each persistent buffer; nothing waits for the device.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self._torch = torch.get_rng_state()
        device = run.mesh.device
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._buffers = [(each, each.detach().clone()) for each in run.guard.buffers]

    def restore(self) -> None:
        """Clear the gradients and restore the generators and buffers."""
        run = self._run
        run.zero_grad(run.trained())
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, run.mesh.device)
