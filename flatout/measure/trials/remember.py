"""Keep the last measured gain of each speedup in the cache, where `auto` and `list` find it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flatout.assembly.prediction import hardware_name, keep, past_run, speedups_on
from flatout.assembly.selection import Decision, Gain
from flatout.hardware import Machine
from flatout.measure.trials.resolving import Resolved
from flatout.measure.trials.results import Report, Row
from flatout.progress import SILENT, Progress

WHERE = {"added": "on the way up", "put-in": "put into the full set", "left-out": "in the full set"}
"""Where each kind of row measured a speedup; later kinds, closer to a real run, take precedence."""


def remember(
    found: Mapping[str, Gain],
    machine: Machine,
    device: str,
    cache: Path,
    *,
    progress: Progress = SILENT,
) -> None:
    """Store measured gains in the table of this hardware, from which `auto` chooses."""
    hardware = hardware_name(machine, device)
    if hardware is None or not found:
        return
    try:
        keep(hardware, cache, found)
    except OSError as error:
        progress.say(
            f"Cannot write {cache}: {error.strerror or error}. "
            "`auto` and `flatout list speedups` will not use the measured gains."
        )


def remember_rate(report: Report, resolved: Resolved, cache: Path) -> None:
    """Store the rate of the full set, from which the duration of a run is predicted."""
    config, names = resolved.config, speedups_on(resolved.decisions)
    hardware = hardware_name(resolved.machine, config.train.device)
    row = next((row for row in report.rows if _is_of(row, names) and row.tokens_per_s), None)
    if hardware is None or row is None or row.tokens_per_s is None:
        return
    rate = row.tokens_per_s.median
    measured = past_run(config, resolved.decisions, by="bench", tokens_per_s=rate)
    with suppress(OSError):  # a cache that cannot be written is left alone
        keep(hardware, cache, run=measured)


def _is_of(row: Row, names: Sequence[str]) -> bool:
    """Return whether a row measured this set, apart from a speedup that chose the micro-batch."""
    on = (Decision(name, True, "") for name in row.speedups)
    return set(names) == set(speedups_on(on))


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
