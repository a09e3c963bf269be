"""The course of a run: what its steps take, in memory that does not grow, and what that shows.

Each rank keeps one. Steps of one number are the same step on every rank, so that ranks can be
compared. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.display import milliseconds
from flatout.measure.evidence import LINES, Evidence, Growth

ROWS = 512
"""Most steps of a course. Beyond that, it forgets every second one, and skips those to come."""
WORK = ("communication", *LINES)
"""Phases of a `PhaseTimer`: waiting for other ranks, and a rank's own work."""
COLUMNS = ("special", "seconds", "size", "reduced", "memory", "host", "asked", "workers", *WORK)
"""Of a step: whether it is not ordinary, its seconds, elements of its inputs, passes after which
gradients are reduced, MiB in use on the GPU, in the process, those that it has asked for, and in
the loader's workers, phases.
"""
MIN_VALUES = 12
"""Fewest different values by which growth is judged."""
STEADY, CERTAIN = 0.4, 4.0
"""Growth from third to third, as a share of the larger one, from which it is steady, and how many
times as large as its usual chance value the correlation of ranks with time must be.
"""
MIN_UNEVEN = 1000
"""Fewest steps whose memory tells whether it grows where their inputs differ in size."""
MIN_GROWTH = 0.1
"""Growth below which it is noise, as a share of the first third."""
MIN_COMPARED = 5
"""Fewest steps by which ranks are compared."""


class Course:
    """Keeps what every so many steps took, so many that they are few."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []
        self._every, self._steps = 1, 0

    def add(self, *values: float) -> None:
        """Add a step, by its values for COLUMNS."""
        if self._steps % self._every == 0:
            self._rows.append(values)
        if len(self._rows) > ROWS:
            del self._rows[1::2]
            self._every *= 2
        self._steps += 1

    def found(self) -> dict[str, Any]:
        """Return what the steps show, by the names in `Evidence`."""
        rows = np.array(self._rows)
        columns = dict(zip(COLUMNS, rows[rows[:, 0] == 0].T, strict=True))
        grows = {name: one for name in COLUMNS if (one := growth(columns[name], self._every))}
        host, asked = grows.get("host"), columns["asked"]
        if host and asked.any():
            first, _, last = (np.median(third) for third in np.array_split(asked, 3))
            if last - first < (host.last - host.first) / 2:
                host = None  # it writes to what it had before, or reads more of a mapped file
        leak = grows.get("memory") or host
        return {
            "course": self._rows,
            "grows": grows,
            "uneven": self._steps < MIN_UNEVEN and len(np.unique(columns["size"])) >= MIN_VALUES,
            "growth_bytes": leak.per_1000 * 2**20 / 1e3 if leak else 0.0,
            "gradient_syncs": columns["reduced"].mean(),
        }


def growth(values: NDArray[np.float64], every: int) -> Growth | None:
    """Return how the values of every so many steps grow. None if not, or little, or not steadily.

    The medians of its thirds and the order of all values decide, so that neither outliers, a single
    rise nor noise count.
    """
    if len(np.unique(values)) < MIN_VALUES:
        return None
    first, middle, last = (float(np.median(third)) for third in np.array_split(values, 3))
    rises, grown = sorted((middle - first, last - middle)), 1.5 * (last - first)
    order = np.corrcoef(values.argsort().argsort(), range(len(values)))[0, 1]
    is_steady = rises[0] > STEADY * rises[1] and order * len(values) ** 0.5 > CERTAIN
    if not is_steady or grown < MIN_GROWTH * first:
        return None
    return Growth(first=first, last=last, per_1000=1e3 * grown / (len(values) * every))


def compared(ranks: Mapping[int, Evidence]) -> Evidence:
    """Return the evidence of the first rank, with what compares all: for what they wait.

    Only steps count that are ordinary on every rank. In each, the rank that waits the least is the
    slowest: what it takes for collectives is their transfer, and what others take beyond that is
    waiting. On a GPU, kernels of the recorded steps tell, since the host does not wait.
    """
    every = [*ranks.values()]
    steps = zip(*(one.course for one in every), strict=False)
    same = [step for step in steps if not any(row[0] for row in step)]
    rows = np.array(same).reshape(-1, len(every), len(COLUMNS))
    waits = rows[..., COLUMNS.index("communication")]
    if every[0].on_gpu:
        waits[:] = [one.communication_s or 0.0 for one in every]
    is_slow = waits == waits.min(1, keepdims=True)
    if len(same) < MIN_COMPARED or is_slow.all():  # there is one rank, or it is not known
        return every[0]
    means = (rows[one].mean(0).tolist() for one in (is_slow, ~is_slow))
    own, rest = (dict(zip(COLUMNS, one, strict=True)) for one in means)
    phase = max(LINES, key=lambda name: own[name] - rest[name])
    at = is_slow.sum(0).argmax()
    rank, sizes = [*ranks][at], rows[..., COLUMNS.index("size")].mean(0)
    own_s = zip(ranks, (rows[..., 1] - waits).mean(0), strict=True)
    each = ", ".join(f"{one}: {milliseconds(s)}" for one, s in own_s)
    update = {
        "sites": {**every[0].sites, "rank": ranks[rank].sites.get(LINES[phase], ())},
        "machine_lines": (("Ranks", f"own work of a step: {each}"),),
        "waiting_s": float(waits.mean()) - own["communication"],
        "transfer_s": own["communication"],
        "slowest": rank,
        "slowest_phase": phase,
        "slowest_size": float(sizes[at] / (np.delete(sizes, at).mean() or math.inf)),
    }
    return every[0].model_copy(update=update)
