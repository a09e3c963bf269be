"""Reads a step's metrics one step late, so that the host never waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DelayedReadback:
    """Starts copying a step's metrics when the step is queued, and reads them one step later."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, list[str], Tensor, torch.cuda.Event | None]] = deque()
        self._newest = 0

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Queue a copy of `values` (name to 0-D tensor) to the host if the step is `due`.

        Shapes: each value is 0-D.
        """
        self._newest = step
        if not due:
            return
        import torch

        from flatout.ops import in_float64

        stacked = torch.stack([in_float64(value) for value in values.values()])
        copied = None
        if stacked.is_cuda:
            host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            device = stacked.device
            stacked = host.copy_(stacked, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(device))
        self._pending.append((step, list(values), stacked, copied))

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the metrics of all due steps before the newest. With `flush`, of that one too."""
        read = []
        while self._pending and (flush or self._pending[0][0] < self._newest):
            step, names, values, copied = self._pending.popleft()
            if copied is not None:
                copied.synchronize()
            read.append((step, dict(zip(names, values.tolist(), strict=True))))
        return read
