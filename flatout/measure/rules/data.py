"""Data: steps wait for it, or it does not suit the model or the length of the run."""

from __future__ import annotations

import math

from flatout.measure.diagnose.diagnosis import Finding, Fix, Harm, fix, ms, rule, speedup_fixes
from flatout.measure.steps.evidence import Evidence, lacks_shared
from flatout.progress import counted

SLOW_DATA = 0.1
"""Share of the step from which waiting for data is a finding."""
MIN_SHARE_CONFIRMED = 0.3
"""Share of the wait that must disappear with synthetic data, if that was measured."""
WITHOUT_WAIT = "the step without its wait for data"
MIN_STALLED = 0.2
"""Share of the wait at which the machine must have waited for a disk."""
MIN_DISK_BYTES = 64 * 2**10
"""Fewest bytes per step that come from a disk."""
SLOW_COPIES = 0.02
"""Share of the step from which unpinned copies are a finding."""
MOST_EPOCHS = 100.0
"""More passes over the text only memorise it."""
MOST_UNUSED, MIN_UNUSED = 0.2, 512
"""Share of the model's vocabulary that may be unused, for padding to a round number; fewer unused
tokens than MIN_UNUSED do no harm.
"""


@rule(unless=("slow-disk",))
def slow_data(evidence: Evidence) -> Finding | None:
    """Steps wait for data."""
    share, site = _lost_to_data(evidence), evidence.site("data")
    if share is None:
        return None
    why = (share, WITHOUT_WAIT)
    fixes: list[Fix] = []
    loop = evidence.loop
    workers = loop.workers or 0
    if loop.dataset == "memory":
        fixes.append(
            fix("Index the tensors with the indices of a whole batch: rows[indices].", *why)
        )
    elif workers:
        fixes.append(
            fix("Make __getitem__ and collate_fn cheaper, or prepare the data once.", *why)
        )
    elif site is not None:
        where = f"Move the work of {site.describe()} out of the step"
        fixes.append(fix(f"{where}: do it once, before training.", *why))
    if evidence.config is not None:
        ahead = f"{WITHOUT_WAIT}, if the device takes longer than reading"
        fixes += speedup_fixes(evidence, "reader", "Read tokens instead of text", *why)
        fixes += speedup_fixes(evidence, "loader", "Read ahead in the background", share, ahead)
        if evidence.data.read_bytes_per_step != 0:
            fixes.append(fix("Copy the dataset to a local disk.", *why))
    elif loop.dataset != "memory":
        fixes += _more_workers(evidence, share)
        if site is None:
            fixes.append(fix("Prepare the data before training.", *why))
    figures = _data_figures(evidence)
    verdict = f"{share:.0%} of each step waits for data: {figures['data_wait_ms']:.3g} ms."
    if loop.dataset == "memory":
        verdict += " Its rows are tensors in memory."
        if workers:
            verdict += f" {counted(workers, 'worker process', 'worker processes')} copy each batch"
            verdict += ", and save nothing."
            fixes.insert(0, fix("Set num_workers=0.", *why))
    return Finding(
        verdict=verdict,
        figures=figures,
        share=share,
        site=site,
        fixes=fixes,
    )


def _more_workers(evidence: Evidence, share: float) -> list[Fix]:
    """Return the fix to read in more processes, if there are cores for them."""
    rest, now = max(1 - share, 0.05), evidence.loop.workers or 0
    free = (evidence.host.cores or 8) - 1 - now
    if free < 1 and now:
        return []
    workers = max(min(math.ceil(share / rest), free), 1) + now
    pinned = ", pin_memory=True" if evidence.on_gpu else ""
    text = f"Read ahead in processes: DataLoader(num_workers={workers}{pinned}, "
    text += "persistent_workers=True, prefetch_factor=4)."
    if evidence.loop.dataset == "iterable":
        text += " Divide the rows in __iter__ by torch.utils.data.get_worker_info() first: without "
        text += "that, each worker yields all of them."
    if lacks_shared(evidence):
        text += " /dev/shm, through which they send batches, has only "
        text += f"{1024 * (evidence.host.shared_gib or 0.0):.0f} MiB: start the container with "
        text += "--shm-size=8g first."
    left = max(share / workers - rest, 0.0)
    return [fix(text, share - left, "the wait, shared by the workers")]


@rule()
def repeated_rows(evidence: Evidence) -> Finding | None:
    """Each worker of a DataLoader yields all rows of an iterable dataset."""
    workers = evidence.loop.workers or 0
    if evidence.loop.dataset != "iterable" or workers < 2:
        return None
    return Finding(
        verdict=f"Each of the {workers} workers yields all rows of the IterableDataset: an epoch "
        f"has every row {workers} times.",
        harm="spoils",
        figures={"workers": workers},
        site=evidence.site("data"),
        fixes=[
            fix(
                "Divide the rows in __iter__: torch.utils.data.get_worker_info() has the id of the "
                "worker and their number.",
                same_result=False,
            )
        ],
    )


@rule()
def slow_disk(evidence: Evidence) -> Finding | None:
    """Steps wait for data that comes from a slow disk."""
    share, wait_s = _lost_to_data(evidence), evidence.phases.data_wait_s
    stalled_s, read = evidence.data.disk_stalled_s, evidence.data.read_bytes_per_step or 0.0
    if share is None or wait_s is None or stalled_s is None:
        return None
    if stalled_s < MIN_STALLED * wait_s or read < MIN_DISK_BYTES:
        return None
    rate = read / wait_s / 1e6
    text = "Copy the data to a local disk, or to memory if it fits there."
    return Finding(
        verdict=f"{share:.0%} of each step waits for a disk that delivers {rate:.3g} MB/s.",
        figures=_data_figures(evidence) | {"disk_stalled_ms": ms(stalled_s), "disk_mb_per_s": rate},
        share=share,
        site=evidence.site("data"),
        fixes=[fix(text, share, WITHOUT_WAIT)],
    )


def _lost_to_data(evidence: Evidence) -> float | None:
    """Return the share of a step that is lost to waiting for data, if it is a finding.

    If the same steps are no faster on synthetic data, the GPU works while the host waits.
    """
    wait_s, step_s = evidence.phases.data_wait_s, evidence.step_s
    synthetic_s = evidence.counterfactual_s.get("synthetic-data")
    if evidence.on_gpu and wait_s and step_s and synthetic_s is not None:
        confirmed = step_s - synthetic_s >= MIN_SHARE_CONFIRMED * wait_s
        wait_s = wait_s if confirmed else None
    return evidence.lost(wait_s, SLOW_DATA)


def _data_figures(evidence: Evidence) -> dict[str, float | None]:
    read = evidence.data.read_bytes_per_step
    return {
        "step_ms": ms(evidence.step_s),
        "data_wait_ms": ms(evidence.phases.data_wait_s),
        "step_on_synthetic_data_ms": ms(evidence.counterfactual_s.get("synthetic-data")),
        "read_from_disk_kib_per_step": None if read is None else read / 2**10,
    }


@rule()
def pageable_copies(evidence: Evidence) -> Finding | None:
    """Batches are copied to the GPU from memory that is not pinned, so the host waits."""
    found = evidence.counts
    share = evidence.lost(found.pageable_copy_s, SLOW_COPIES)
    if not evidence.on_gpu or not found.pageable_copies or not found.pageable_copy_s or not share:
        return None
    rate = (found.pageable_copy_bytes or 0.0) / found.pageable_copy_s / 1e9
    text = "Use DataLoader(pin_memory=True), and copy with .to(device, non_blocking=True)."
    overrides = {}
    if evidence.lacks("prefetch"):
        text = "Copy from pinned memory in the background: add the speedup prefetch."
        overrides = {"speedups": "+prefetch"}
    gain_from = "the time of the copies, which pinned ones hide"
    return Finding(
        verdict=f"{share:.0%} of each step copies batches to the GPU from memory that is not "
        "pinned.",
        figures={
            "copies_per_step": found.pageable_copies,
            "copies_ms": ms(found.pageable_copy_s),
            "gb_per_s": rate or None,
        },
        share=share,
        site=evidence.site("copy"),
        fixes=[fix(text, share, gain_from, overrides=overrides)],
    )


@rule()
def length(evidence: Evidence) -> Finding | None:
    """The run is too long or too short for its data: it memorises the text or sees little of it."""
    epochs, data, per_step = evidence.epochs, evidence.data, evidence.tokens_per_step
    if epochs is not None and epochs > MOST_EPOCHS:
        harm: Harm = "spoils"
        verdict = f"The run reads its text {epochs:,.0f} times: it will memorise it."
        fixes = [
            "Prepare more text, or shorten the run.",
            "Stop when the validation loss no longer falls: train.patience=5 with "
            "train.eval_every.",
        ]
    elif data.train_tokens and per_step and per_step > data.train_tokens:
        harm = "spoils"
        verdict = (
            f"One step reads {per_step:,} tokens, and the text has only {data.train_tokens:,}: "
            "each step sees it more than once."
        )
        fixes = ["Lower batch.tokens_per_step, or prepare more text."]
    elif data.val_tokens == 0 and (evidence.setting("train.eval_every") or 0) > 0:
        harm = "warns"
        verdict = "train.eval_every is set, and the dataset has no text for validation."
        fixes = ['Prepare it again with --split "tail 0.1".']
    else:
        return None
    return Finding(
        verdict=verdict,
        harm=harm,
        figures={
            "epochs": epochs,
            "steps": evidence.planned_steps,
            "train_tokens": data.train_tokens,
            "tokens_per_step": per_step,
            "parameters": evidence.parameters,
        },
        fixes=[*map(fix, fixes)],
    )


@rule()
def vocabulary(evidence: Evidence) -> Finding | None:
    """The model's vocabulary is much larger than the dataset's."""
    of_model, of_data = evidence.setting("model.vocab_size"), evidence.data.vocab_size
    if of_model is None or of_data is None:
        return None
    if of_model - of_data < max(MIN_UNUSED, MOST_UNUSED * of_model):
        return None
    overrides = {"model.vocab_size": None}
    return Finding(
        verdict=f"The model has {of_model:,} tokens, and the dataset only {of_data:,}: embedding "
        "and loss compute the rest for nothing.",
        figures={"model.vocab_size": of_model, "dataset_vocab_size": of_data},
        fixes=[fix("Remove model.vocab_size.", overrides=overrides, same_result=False)],
    )
