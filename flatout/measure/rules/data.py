"""Data: steps wait for it, or it does not suit the length of the run."""

from __future__ import annotations

import math

from flatout.measure.rules import Finding, Fix, Harm, fix, rule, speedup_fixes
from flatout.measure.steps.evidence import Evidence

SLOW_DATA = 0.1
"""Share of the step from which waiting for data is a finding."""
MIN_CONFIRMED = 0.3
"""Share of the wait that must disappear with synthetic data, if that was measured."""
MIN_STALLED, MIN_DISK_BYTES = 0.2, 64 * 2**10
"""Share of the wait at which the machine must have waited for a disk, and bytes from it per step,
from which the disk is the cause.
"""
MOST_EPOCHS = 100.0
"""More passes over the text only memorise it."""


@rule(site="data", shows=("step_s", "data_wait_s", "read_bytes_per_step", "disk_stalled_s"))
def slow_data(evidence: Evidence) -> Finding | None:
    """Steps wait for data, or for the disk that has it."""
    wait_s, step_s = evidence.data_wait_s or 0.0, evidence.step_s or 0.0
    synthetic_s, site = evidence.counterfactual_s.get("synthetic-data"), evidence.site("data")
    share, is_script = evidence.share(wait_s, SLOW_DATA), evidence.config is None
    if share is None:
        return None
    if evidence.on_gpu and synthetic_s and step_s - synthetic_s < MIN_CONFIRMED * wait_s:
        return None  # the GPU works while the host waits
    verdict, texts = f"{share:.0%} of each step waits for data: {1e3 * wait_s:.3g} ms.", []
    read, workers = evidence.read_bytes_per_step or 0.0, evidence.workers or 0
    if read >= MIN_DISK_BYTES and (evidence.disk_stalled_s or 0.0) >= MIN_STALLED * wait_s:
        rate = read / wait_s / 1e6
        verdict = f"{share:.0%} of each step waits for a disk that delivers {rate:.3g} MB/s."
        texts = ["Copy the data to a local disk, or to memory if it fits there."]
    if evidence.dataset == "memory":
        verdict += " Its rows are tensors in memory."
        if workers:
            verdict += f" {workers} worker processes copy each batch, and save nothing."
            texts.append("Set num_workers=0.")
        texts.append("Index the tensors with the indices of a whole batch: rows[indices].")
    elif workers:
        texts.append("Make __getitem__ and collate_fn cheaper, or prepare the data once.")
    elif site is not None:
        where = f"Move the work of {site.describe()} out of the step"
        texts.append(f"{where}: do it once, before training.")
    elif is_script:
        texts.append("Prepare the data before training.")
    why = "the step without its wait for data"
    fixes = [fix(text, share, why) for text in texts]
    fixes += speedup_fixes(evidence, "reader", "Read tokens instead of text", share, why)
    why += ", if the device takes longer than reading"
    fixes += speedup_fixes(evidence, "loader", "Read ahead in the background", share, why)
    if is_script and evidence.dataset != "memory":
        fixes += _more_workers(evidence, share)
    return Finding(verdict=verdict, share=share, fixes=fixes)


def _more_workers(evidence: Evidence, share: float) -> list[Fix]:
    """Return the fix to read in more processes, if there are cores for them."""
    rest, now = max(1 - share, 0.05), evidence.workers or 0
    free = (evidence.cores or 8) - 1 - now
    if free < 1 and now:
        return []
    workers = max(min(math.ceil(share / rest), free), 1) + now
    pinned = ", pin_memory=True" if evidence.on_gpu else ""
    text = f"Read ahead in processes: DataLoader(num_workers={workers}{pinned}, "
    text += "persistent_workers=True, prefetch_factor=4)."
    if evidence.dataset == "iterable":
        text += " Divide the rows in __iter__ by torch.utils.data.get_worker_info() first: without "
        text += "that, each worker yields all of them."
    if evidence.lacks_shared:
        text += " /dev/shm, through which they send batches, has only "
        text += f"{1024 * (evidence.shared_gib or 0.0):.0f} MiB: start the container with "
        text += "--shm-size=8g first."
    left = max(share / workers - rest, 0.0)
    return [fix(text, share - left, "the wait, shared by the workers")]


@rule(shows=("epochs", "planned_steps", "train_tokens", "tokens_per_step"))
def length(evidence: Evidence) -> Finding | None:
    """The run is too long or too short for its data: it memorises the text or sees little of it."""
    epochs, tokens = evidence.epochs or 0.0, evidence.train_tokens
    per_step, every = evidence.tokens_per_step or 0, evidence.setting("train.eval_every")
    harm: Harm = "spoils"
    if epochs > MOST_EPOCHS:
        verdict = f"The run reads its text {epochs:,.0f} times: it will memorise it."
        text = "Prepare more text, or shorten the run. Or stop when the validation loss no longer "
        text += "falls: train.patience=5 with train.eval_every."
    elif tokens and per_step > tokens:
        verdict = f"One step reads {per_step:,} tokens, and the text has only {tokens:,}: each "
        verdict += "step sees it more than once."
        text = "Lower batch.tokens_per_step, or prepare more text."
    elif evidence.val_tokens == 0 and every:
        verdict = "train.eval_every is set, and the dataset has no text for validation."
        harm, text = "warns", 'Prepare it again with --split "tail 0.1".'
    else:
        return None
    return Finding(verdict=verdict, harm=harm, fixes=(fix(text),))
