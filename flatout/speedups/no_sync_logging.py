"""Read a step's figures one step late, so that the host never waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from flatout.assembly.recipe import On, Promise, Speedup


class DelayedReadback:
    """Starts the copy of a due step's figures when the step is queued, and reads it when the next
    one is.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, list[str], Any, Any]] = deque()
        self._newest = 0

    def push(self, step: int, values: Mapping[str, Any], *, due: bool) -> None:
        """Queue the copy of `values` (name to 0-D tensor) to the host; a step that is not due costs
        nothing.
        """
        self._newest = step
        if not due:
            return
        import torch

        stacked = torch.stack([value.double() for value in values.values()])
        copied = None
        if stacked.is_cuda:
            host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            device = stacked.device
            stacked = host.copy_(stacked, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(device))
        self._pending.append((step, list(values), stacked, copied))

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the figures of all due steps but the one just queued; with `flush`, of that one
        too.
        """
        read = []
        while self._pending and (flush or self._pending[0][0] < self._newest):
            step, names, values, copied = self._pending.popleft()
            if copied is not None:
                copied.synchronize()
            read.append((step, dict(zip(names, values.tolist(), strict=True))))
        return read


SPEEDUP = Speedup(
    name="no-sync-logging",
    fills={"readback": DelayedReadback},
    saves="time: the device does not idle while the host asks for the loss",
    promise=Promise.exact(),
    rank=130,
    auto={"cpu": On(measured=True), "cuda": On()},
)
