"""What the loop tells whoever watches it. Injected from above, so that training knows nothing of
terminals or reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from flatout.assembly.run import Run


class Observer(Protocol):
    """Watches one run on its main rank. Every method returns quickly: the device may be waiting."""

    def on_start(self, run: Run) -> None:
        """Take note that the run is built, and resumed where it was; the first step comes next."""

    def on_tick(self, step: int, last_step: int) -> None:
        """Take note that step `step` of `last_step` has been queued. Called every step, carries no
        figures.
        """

    def on_record(self, record: Mapping[str, float]) -> None:
        """Take one line of metrics.jsonl: `step`, `tokens`, `wall_s`, `elapsed_s` and what was
        measured.
        """

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take one line of events.jsonl: `event` names its kind."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Take the run's summary.json."""


class Quiet:
    """An observer that does nothing, to derive from when only one method matters."""

    def on_start(self, run: Run) -> None:
        """Do nothing."""

    def on_tick(self, step: int, last_step: int) -> None:
        """Do nothing."""

    def on_record(self, record: Mapping[str, float]) -> None:
        """Do nothing."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Do nothing."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""
