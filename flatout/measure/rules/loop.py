"""The loop: its data, and settings of the recipe that are slower than others."""

from __future__ import annotations

import math

from flatout.config.schema import RunConfig, parse_overrides
from flatout.measure.evidence import MOST_WORKERS, Evidence
from flatout.measure.rules import Found, Remedy, row, rule, speedup

SLOW = 0.1
"""Share of the step from which waiting for data, and slower settings, are a finding."""
TAKEN, NO_CORE = 0.3, 0.85
"""Share of a run's processor time that its workers take, and of the cores that are busy, from which
those are missing in the steps.
"""
HALF = 0.5
"""Share of the memory up to which the run needs no checkpointing of activations."""
MIN_CONFIRMED = 0.3
"""Share of the wait that must disappear with synthetic data, if that was measured."""
MIN_STALLED, MIN_DISK_BYTES = 0.2, 64 * 2**10
"""Share of the wait at which the machine must have waited for a disk, and bytes from it per step,
from which the disk is the cause.
"""


@rule(site="worker data", shows="data_wait_s read_bytes_per_step disk_stalled_s")
def slow_data(evidence: Evidence) -> Found | None:
    """Steps wait for data, or for the disk that has it."""
    wait_s, step_s = evidence.data_wait_s or 0.0, evidence.step_s or 0.0
    synthetic_s = evidence.counterfactual_s.get("synthetic-data", 0.0)
    if evidence.on_gpu and step_s - synthetic_s < MIN_CONFIRMED * wait_s:
        return None  # the GPU works while the host waits
    reads = (evidence.read_bytes_per_step or 0.0) >= MIN_DISK_BYTES
    is_disk = reads and (evidence.disk_stalled_s or 0.0) >= MIN_STALLED * wait_s
    ways = (
        evidence.wait_words and "Keep them: DataLoader(persistent_workers=True).",
        is_disk and "Copy the data to a local disk, or to memory if it fits there.",
        evidence.dataset == "memory"
        and "Its rows are tensors in memory: index them with the indices of a whole batch, "
        "rows[indices], with num_workers=0, as workers would only copy them.",
        speedup("reader", "Read tokens instead of text: {set}."),
        speedup("loader", "Read ahead in the background: {set}."),
        more_workers,
        # without a line of a worker, that of the loop is where it waits
        evidence.site("worker data" if not evidence.workers else "worker")
        and "Do the work of {line} once, before training.",
        evidence.config and "Copy the dataset to a faster disk, or leave a core free for reading.",
        "Make __getitem__ and collate_fn cheaper, or prepare the data once, before training. A "
        "DataLoader that is made, or started, in each epoch needs persistent_workers=True.",
    )
    what = f"{{share:.0%}} of each step waits for {'a disk' if is_disk else 'data'}"
    what += "{e.wait_words}."
    return evidence.share(wait_s, SLOW), what, ways


@rule(site="worker", shows="own_cores worker_cores", unless="slow-data")
def costly_workers(evidence: Evidence) -> Found:
    """The DataLoader's workers take the cores on which the run computes."""
    own, workers = evidence.own_cores or 0.0, evidence.worker_cores or 0.0
    is_full = own + (evidence.other_busy_cores or 0.0) > NO_CORE * (evidence.cores or math.inf)
    loses = evidence.device == "cpu" and evidence.site("worker") and own and is_full
    return (
        loses and evidence.share(workers / own * (evidence.step_s or 0.0), TAKEN),
        "The DataLoader's workers take {share:.0%} of the processor time of the run, which keeps "
        "every core busy, most of it at {site}.",
        (
            "Do the work of {line} once, before training, and let __getitem__ return what is "
            "ready: the workers repeat it for each item.",
        ),
    )


NEEDLESS = row(
    "needless-recomputing",
    "Activations are recomputed although memory is free.",
    lambda e: 0 < e.used_share < HALF and e.peak_gib and e.share(e.seconds_at("recomputed"), SLOW),
    "{share:.0%} of each step computes parts of the forward pass once more, although only "
    "{e.peak_gib:.1f} of {e.total_gib:.1f} GiB of memory are used.",
    "Call the modules without torch.utils.checkpoint, or checkpoint only some of them.",
    site="checkpointed recomputed",
)


def more_workers(evidence: Evidence, share: float) -> Remedy:
    """Return the remedy to read in more processes, if there are cores for them."""
    now = evidence.workers or 0
    free = (MOST_WORKERS if evidence.reads_asleep else (evidence.cores or 8) - 1) - now
    if evidence.config is not None or evidence.dataset == "memory" or (free < 1 and now):
        return None
    workers = max(min(math.ceil(share / max(1 - share, 0.05)), free), 1) + now
    text = f"Read ahead in processes: DataLoader(num_workers={workers}, persistent_workers=True, "
    text += f"prefetch_factor=4, pin_memory={evidence.on_gpu}). Or prepare the data once."
    if evidence.dataset == "iterable":
        text += " Divide the rows in __iter__ by torch.utils.data.get_worker_info() first: without "
        text += "that, each worker yields all of them."
    if evidence.lacks_shared:
        text += " Processes send batches through /dev/shm, which is too small: start the container "
        text += "with --shm-size=8g first."
    return text


@rule()
def slow_settings(evidence: Evidence) -> Found:
    """Different settings of the recipe make its steps shorter on this CPU."""
    others = ((s, name) for name, s in evidence.counterfactual_s.items() if "=" in name)
    seconds, best = min(others, default=(math.inf, ""))
    share = evidence.share((evidence.step_s or 0.0) - seconds, SLOW)
    way = "Set {set}.", parse_overrides(best.split(), RunConfig)
    return evidence.config and share, f"With {best}, a step takes {{share:.0%}} less.", (way,)
