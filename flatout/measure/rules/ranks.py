"""What several processes do to each other, and what grows in a long run."""

from __future__ import annotations

import math

from flatout.measure.course import COLUMNS
from flatout.measure.evidence import Evidence
from flatout.measure.rules import Found, row, rule
from flatout.measure.rules.table import shorter

SLOW, MORE = 0.1, 1.2
"""Share of the step from which waiting for a rank is a finding, and how many times as large its
inputs must be to be the reason, or as long the last third of the steps.
"""
SIZE = COLUMNS.index("size")
BUSY = 0.5
"""Cores of other processes from which the computation of a rank is not judged, nor longer steps."""
OF_PHASES = {
    "data_wait": "Make the data of this rank as fast as that of the others: its disk, its share of "
    "the files, its workers.",
    "evaluation": "Divide evaluations among the ranks, or evaluate less often.",
    "other": "Take it out of the step, or divide its work among the ranks.",
}
"""What to do about what takes one rank longer, by its phase."""


@rule(site="rank")
def slow_rank(evidence: Evidence) -> Found:
    """Ranks wait for one that is slower, or whose batches are larger."""
    is_longer, phase = evidence.slowest_size >= MORE, evidence.slowest_phase
    is_busy = (evidence.other_busy_cores or 0.0) > BUSY and phase in ("forward", "backward")
    what = "{share:.0%} of each step, ranks wait for the slowest one, most often rank {e.slowest}. "
    what += f"It takes longer in the phase {phase!r}."
    what += " Its inputs have {e.slowest_size:.1f} times as many elements." * is_longer
    ways = (
        is_longer
        and "Give all ranks batches of about the same number of elements: sort rows by "
        "length, and deal rows of one length to all ranks in the same step.",
        OF_PHASES.get(phase),
        "Compare its processor, clock rate and other processes with those of the other ranks.",
    )
    return (is_longer or not is_busy) and evidence.share(evidence.waiting_s, SLOW), what, ways


ROWS = [
    row(
        "accumulation-sync",
        "Ranks reduce their gradients after each micro-batch instead of once per step.",
        lambda e: (
            (e.gradient_syncs or 0.0) >= 1.5
            and (e.share(e.transfer_s or e.communication_s) or "warns")
        ),
        "Gradients are reduced {e.gradient_syncs:.3g} times in each step, at {site}. Once is "
        "enough: after the last micro-batch.",
        "Do the forward and backward passes of all other micro-batches in `with model.no_sync():`, "
        "or with accelerate all of them in `with accelerator.accumulate(model):`.",
        site="communication backward",
    ),
    row(
        "growing-steps",
        "Steps take longer and longer.",
        lambda e: (
            "size" not in e.grows  # longer inputs take longer
            and (e.other_busy_cores or 0.0) <= BUSY
            and (grown := e.grows.get("seconds"))
            and grown.last >= MORE * grown.first
            and 1 - grown.first / grown.last
        ),
        "Steps take longer and longer: {e.grows[seconds].first:.3g} s in their first third, "
        "{e.grows[seconds].last:.3g} s in the last, {e.grows[seconds].per_1000:.3g} s more every "
        "1,000 steps.",
        shorter,
        "Look for what it repeats for all earlier steps.",
        site="own data compute",
        unless="growing-memory",
    ),
    row(
        "shared-memory",
        "Worker processes send batches through shared memory that has little room for them.",
        lambda e: (
            # two batches of each, of four bytes per element, should take half of it at most
            (e.workers or 0) * max((row[SIZE] for row in e.course), default=0) * 4 * 2
            > (math.inf if e.shared_gib is None else e.shared_gib * 2**29)
            and "warns"
        ),
        "{e.workers} worker processes send their batches through /dev/shm, which has "
        "{e.shared_gib:.2g} GiB: the run may end with a bus error.",
        "Start the container with --shm-size=8g, or use fewer workers or smaller batches.",
        site="rows",
    ),
    row(
        "workers-memory",
        "The memory of the DataLoader's workers grows.",
        lambda e: (grown := e.grows.get("workers")) and grown.per_1000 >= 1 and "warns",
        "The DataLoader's {e.workers} workers take {e.grows[workers].per_1000:,.0f} MiB more "
        "every 1,000 steps.",
        "Keep the rows in a NumPy array, a tensor or an Arrow table instead of a list or dict of "
        "Python objects, whose reference counts make each worker copy them. Or remove what "
        "__getitem__ keeps.",
        site="rows",
    ),
]
