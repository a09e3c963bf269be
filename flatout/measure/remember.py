"""Keep the last measured gain of each speedup in the cache, where `auto` and `list` find it."""

from __future__ import annotations

from pathlib import Path

from flatout.hardware import Machine
from flatout.measure.results import Report
from flatout.measured import Gain, hardware_name, keep
from flatout.progress import SILENT, Progress

WHERE = {"added": "on the way up", "put-in": "put into the full set", "left-out": "in the full set"}
"""What a kind of row says about a speedup. The last of these counts: it is closest to a real run.
"""


def remember(
    report: Report, machine: Machine, device: str, cache: Path, *, progress: Progress = SILENT
) -> None:
    """Store what a ladder measured on this hardware; a sweep measures no gains."""
    hardware, found = hardware_name(machine, device), gains(report)
    if hardware is None or not found:
        return
    try:
        keep(hardware, found, cache)
    except OSError as error:
        progress.say(
            f"Cannot write {cache}: {error.strerror or error}. "
            "`auto` and `flatout list speedups` will not know what was measured."
        )


def gains(report: Report) -> dict[str, Gain]:
    """Return the gain of each speedup of a ladder, by name.

    Speedups without figures are left out, and those whose losses broke their promise.
    """
    found: dict[str, Gain] = {}
    for kind, where in WHERE.items():
        for row in report.rows:
            if row.kind == kind and row.speedup and row.gain and row.promise_kept is not False:
                found[row.speedup] = Gain(
                    gain=row.gain.median,
                    low=row.gain.low,
                    high=row.gain.high,
                    where=where,
                    recipe=report.recipe,
                    date=report.began,
                    commit=report.commit,
                    torch=str(report.environment.get("torch", "unknown")),
                )
    return found
