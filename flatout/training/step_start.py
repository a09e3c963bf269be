"""What a step that is dropped puts back: random generators and buffers as they were before its
first micro-batch.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from flatout.assembly.run import Run


class StepStart:
    """The state that forward and backward passes change, copied before a step; weights and
    optimizers change only at its end.

    These are the generators of `state.STATE` and the model's persistent buffers. Cost: about 30
    microseconds of the host, and a queued copy of each persistent buffer; nothing waits for the
    device.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self._torch = torch.get_rng_state()
        self._cuda = (
            torch.cuda.get_rng_state(run.mesh.device) if run.mesh.device.type == "cuda" else None
        )
        self._buffers = [
            (buffer, buffer.detach().clone()) for buffer in persistent_buffers(run.core)
        ]

    def restore(self) -> None:
        """Clear the gradients, and put the generators and buffers back."""
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


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that a checkpoint holds; the others are made anew with the model.

    Shapes: any.
    """
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
