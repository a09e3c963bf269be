"""From a ladder to what this machine keeps of it: the last gain of each speedup on its GPU."""

from __future__ import annotations

from pathlib import Path

from flatout.hardware import Machine
from flatout.measure.results import Report
from flatout.measured import Gain, gpu_name, keep
from flatout.progress import SILENT, Progress

WHERE = {"added": "on the way up", "put-in": "put into the full set", "left-out": "in the full set"}
"""What a line of the ladder says of a speedup; of several lines about one the last of these counts,
which is nearest to what a run uses.
"""


def remember(
    report: Report, machine: Machine, device: str, cache: Path, *, progress: Progress = SILENT
) -> None:
    """Keep what a ladder measured on a GPU, for `flatout list speedups`; nothing of a sweep, nor of
    a CPU.
    """
    gpu, found = gpu_name(machine, device), gains(report)
    if gpu is None or not found:
        return
    try:
        keep(gpu, found, cache)
    except OSError as error:
        progress.say(
            f"Cannot write {cache}: {error.strerror or error}. `flatout list speedups` will not show what was measured."
        )


def gains(report: Report) -> dict[str, Gain]:
    """Return what each speedup of a ladder gained, by name; without those that gave no figures."""
    found: dict[str, Gain] = {}
    for kind, where in WHERE.items():
        for row in report.rows:
            if row.kind == kind and row.speedup and row.gain:
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
