"""The interface through which the loop reports to observers.

Callers pass observers in, so training knows nothing about terminals or reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from flatout.storage.json_io import JsonObject

if TYPE_CHECKING:
    from flatout.assembly.run import Run


class Observer(Protocol):
    """Watches one run on rank 0. Methods must return quickly: the device may be idle."""

    def on_start(self, run: Run) -> None:
        """Receive the run, built and restored, just before its first step."""
        return  # an empty body would make the method abstract for type checkers

    def on_tick(self, step: int, last_step: int) -> None:
        """Called every step, without metrics, when step `step` of `last_step` is queued."""
        return

    def on_record(self, record: Mapping[str, float]) -> None:
        """Receive a line of metrics.jsonl: the run's position and its metrics."""
        return

    def on_event(self, event: JsonObject) -> None:
        """Receive a line of events.jsonl. Its `event` is the kind."""
        return

    def on_end(self, summary: JsonObject) -> None:
        """Receive the summary of the run."""
        return


class Quiet(Observer):
    """An observer that ignores everything: subclass it and override the methods you need."""
