"""Keep the last measured gain of each speedup in the cache, where `auto` and `list` find it."""

from __future__ import annotations

from pathlib import Path

from flatout.hardware import Machine
from flatout.measure.results import Report
from flatout.measured import Gain, hardware_name, keep
from flatout.progress import SILENT, Progress

WHERE = {"added": "on the way up", "put-in": "put into the full set", "left-out": "in the full set"}
"""Where each kind of row measured a speedup; later kinds, closer to a real run, take precedence."""


def remember(
    report: Report, machine: Machine, device: str, cache: Path, *, progress: Progress = SILENT
) -> None:
    """Store the gains that a ladder measured on this hardware; a sweep measures none."""
    hardware, found = hardware_name(machine, device), gains(report)
    if hardware is None or not found:
        return
    try:
        keep(hardware, found, cache)
    except OSError as error:
        progress.say(
            f"Cannot write {cache}: {error.strerror or error}. "
            "`auto` and `flatout list speedups` will not use the measured gains."
        )


def gains(report: Report) -> dict[str, Gain]:
    """Return the gain of each speedup of a ladder, by name.

    Speedups without figures, and those whose losses broke their promise, are left out.
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
