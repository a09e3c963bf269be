"""Memory: too little of it, or used badly."""

from __future__ import annotations

from flatout.measure.diagnose.diagnosis import Finding, Fix, Harm, fix, rule, with_rows
from flatout.measure.steps.evidence import Evidence

CLOSE = 0.92
"""Share of the memory from which an estimate is a warning: it is not exact."""
FASTER = 1.15
"""How many times faster fewer rows must have been to be a finding."""
FRAGMENTED = 1.3
"""Reserved memory, as a multiple of the tensors', from which it is a finding."""
FULL = 0.8
"""Share of the GPU's memory below which fragmentation does no harm."""
OFTEN_EMPTIED = 0.4
"""Calls of empty_cache per step from which they are a finding."""


@rule()
def out_of_memory(evidence: Evidence) -> Finding | None:
    """The run needs more memory than the device has, or ran out of memory."""
    memory, failure = evidence.memory, evidence.failed("out-of-memory", "killed")
    need, have = memory.estimated_gib, memory.free_gib
    share = need / have if need is not None and have else 0.0
    harm: Harm = "fails"
    if failure is not None:
        verdict = failure.message
    elif share < CLOSE:
        return None
    elif share > 1:
        verdict = f"The run needs about {need:.1f} GiB, and {have:.1f} GiB are available."
    else:
        verdict = f"The run needs about {need:.1f} of {have:.1f} GiB: it may run out of memory."
        harm = "warns"
    fixes: list[Fix] = []
    config, ended = evidence.config, evidence.failure
    if config is not None and config.batch.rows_per_device != "auto":
        # After a failure, at most half of the present rows: the estimate was too low.
        rows = int(config.batch.rows_per_device)
        fit = memory.rows_that_fit
        most = min(rows // 2 if fit is None else fit, rows // 2 if ended else rows - 1)
        per_rank = (config.batch.tokens_per_step or 0) // config.data.seq_len // evidence.world_size
        fewer = next((each for each in range(most, 0, -1) if per_rank % each == 0), None)
        if fewer is not None:
            text = f"Set batch.rows_per_device={fewer}. The tokens per step stay the same."
            fixes.append(fix(text, overrides=with_rows(config, fewer)))
    if evidence.lacks("checkpointing"):
        text = "Add activation checkpointing (the speedup `checkpointing`): it recomputes the "
        text += "blocks' activations, for about a third more computation."
        fixes.append(fix(text, overrides={"speedups": "+checkpointing"}))
    if not fixes:
        advice = ended.fix if ended is not None else None
        fixes.append(fix(advice or "Use a smaller batch, shorter sequences or a smaller model."))
    parts = memory.estimated_parts_gib or {}
    return Finding(
        verdict=verdict,
        harm=harm,
        figures={
            "estimated_gib": need,
            "available_gib": have,
            **{f"{name}_gib": size for name, size in parts.items()},
            "rows_that_fit": memory.rows_that_fit,
        },
        site=ended.site if ended else None,
        fixes=fixes,
    )


@rule(unless=("out-of-memory", "fragmentation"))
def full_memory(evidence: Evidence) -> Finding | None:
    """GPU memory is nearly full, or fewer rows are faster, as when memory spills to the host."""
    memory, config, now = evidence.memory, evidence.config, evidence.roofline.tokens_per_s
    held, total = memory.reserved_gib or memory.peak_gib, memory.total_gib
    used = held / total if evidence.on_gpu and held and total else 0.0
    rows = None if config is None else config.batch.rows_per_device
    fewer = {
        each: rate
        for each, rate in evidence.rates_by_rows.items()
        if isinstance(rows, int) and each < rows and now and rate > FASTER * now
    }
    if used < CLOSE and not fewer:
        return None
    verdict = (
        f"The tensors take {used:.0%} of the GPU's memory: such a run is about to run out of "
        "memory, and a driver that moves memory to the host (Windows, WSL) makes it many times "
        "slower."
    )
    harm: Harm = "slows" if used > 1 or fewer else "warns"
    share, best = None, None
    if fewer and now:
        best = max(fewer, key=lambda each: fewer[each])
        share = 1 - now / fewer[best]
        verdict = f"Micro-batches of {rows} rows reach {now:,.0f} tokens/s. {best} rows reached "
        verdict += f"{fewer[best]:,.0f} here: the larger ones probably exceed the device's memory."
    fixes = [fix(f"Use a smaller batch: at most {CLOSE / max(used, CLOSE):.0%} of this one.")]
    if config is not None and isinstance(rows, int) and rows == 1:
        text = "Add activation checkpointing (the speedup `checkpointing`), or use a smaller model "
        text += "or shorter sequences."
        fixes = [fix(text)]
    elif config is not None and isinstance(rows, int):
        most = best or max(int(rows * CLOSE / used) - 1, 1)
        per_rank = (config.batch.tokens_per_step or 0) // config.data.seq_len // evidence.world_size
        fit = next(each for each in range(most, 0, -1) if per_rank % each == 0)
        text = f"Set batch.rows_per_device={fit}. The tokens per step stay the same."
        fixes = [fix(text, share, "the faster run", overrides=with_rows(config, fit))]
    return Finding(
        verdict=verdict,
        harm=harm,
        figures={
            "held_gib": held,
            "total_gib": total,
            "rows_per_device": rows if isinstance(rows, int) else None,
        },
        share=share,
        fixes=fixes,
    )


@rule()
def fragmentation(evidence: Evidence) -> Finding | None:
    """The allocator reserves much more GPU memory than the tensors need."""
    memory = evidence.memory
    held, used, total = memory.reserved_gib, memory.peak_gib, memory.total_gib
    if not evidence.on_gpu or held is None or not used or not total:
        return None
    setting = (evidence.host.environment or {}).get("PYTORCH_ALLOC_CONF", "")
    if held < max(FRAGMENTED * used, FULL * total) or "expandable_segments:True" in setting:
        return None
    return Finding(
        verdict=f"The allocator holds {held:.1f} GiB for tensors of {used:.1f} GiB: the memory is "
        "fragmented.",
        harm="warns",
        figures={"reserved_gib": held, "peak_gib": used, "total_gib": total},
        fixes=[fix("Set PYTORCH_ALLOC_CONF=expandable_segments:True.")],
    )


@rule()
def empty_cache(evidence: Evidence) -> Finding | None:
    """The loop empties the allocator's cache repeatedly."""
    calls, seconds, site = evidence.counts.empty_cache, None, evidence.site("empty-cache")
    if calls is None or calls < OFTEN_EMPTIED:
        return None
    harm: Harm = "warns"
    effect = "on a GPU that makes the host wait"
    if evidence.on_gpu:
        harm, seconds = "slows", evidence.counts.empty_cache_s
        effect = "it waits for the GPU, and memory must be requested again"
    share = evidence.share(seconds)
    where = f" at {site.describe()}" if site is not None else ""
    text = (
        "Remove the call. Against fragmentation, set PYTORCH_ALLOC_CONF=expandable_segments:True."
    )
    return Finding(
        verdict=f"Each step calls torch.cuda.empty_cache(){where}: {effect}.",
        harm=harm,
        figures={"calls_per_step": calls, "seconds_per_step": seconds},
        share=share,
        site=site,
        fixes=[fix(text, share, "the time of the calls")],
    )
