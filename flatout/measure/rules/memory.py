"""Memory: too little of it, or used badly."""

from __future__ import annotations

from flatout.measure.rules import Finding, Fix, Harm, fix, is_off, rule, with_rows
from flatout.measure.steps.evidence import Evidence

CLOSE = 0.92
"""Share of the memory from which an estimate is a warning: it is not exact."""
FASTER = 1.15
"""How many times faster fewer rows must have been to be a finding."""
MOST_KEPT = 0.5
"""Share of the last steps' graphs that may be in memory."""


def less_memory(evidence: Evidence, most_rows: int, gain: float | None = None) -> list[Fix]:
    """Return the settings that need less memory: at most so many rows, recomputed activations."""
    config, fixes = evidence.config, []
    if config is not None:
        rows = (config.batch.tokens_per_step or 0) // config.data.seq_len // evidence.world_size
        fewer = next((each for each in range(most_rows, 0, -1) if rows % each == 0), None)
        if fewer is not None:
            text = f"Set batch.rows_per_device={fewer}. The tokens per step stay the same."
            fixes.append(fix(text, gain, "the faster run", overrides=with_rows(config, fewer)))
    if is_off(evidence, "checkpointing"):
        text = "Add activation checkpointing (the speedup `checkpointing`): it recomputes the "
        text += "blocks' activations, for about a third more computation."
        fixes.append(fix(text, overrides={"speedups": "+checkpointing"}))
    return fixes or [fix("Use a smaller batch, shorter sequences or a smaller model.")]


@rule(shows=("estimated_gib", "free_gib", "rows_that_fit"))
def out_of_memory(evidence: Evidence) -> Finding | None:
    """The run needs more memory than the device has, or ran out of memory."""
    ended, fit = evidence.failed("out-of-memory", "killed"), evidence.rows_that_fit
    need, have = evidence.estimated_gib or 0.0, evidence.free_gib or 0.0
    harm: Harm = "fails"
    if ended is not None:
        verdict = ended.message
    elif not have or need < CLOSE * have:
        return None
    elif need > have:
        verdict = f"The run needs about {need:.1f} GiB, and {have:.1f} GiB are available."
    else:
        verdict = f"The run needs about {need:.1f} of {have:.1f} GiB: it may run out of memory."
        harm = "warns"
    rows = evidence.setting("batch.rows_per_device")
    rows = rows if isinstance(rows, int) else 0
    # after a failure, at most half of the present rows: the estimate was too low
    most = min(rows // 2 if fit is None else fit, rows // 2 if ended else rows - 1)
    parts = {f"{name}_gib": size for name, size in evidence.estimated_parts_gib.items()}
    fixes, site = less_memory(evidence, most), ended.site if ended else None
    return Finding(verdict=verdict, harm=harm, figures=parts, site=site, fixes=fixes)


@rule(unless=("out-of-memory", "fragmentation"), shows=("reserved_gib", "peak_gib", "total_gib"))
def full_memory(evidence: Evidence) -> Finding | None:
    """GPU memory is nearly full, or fewer rows are faster, as when memory spills to the host."""
    held, now = evidence.reserved_gib or evidence.peak_gib or 0.0, evidence.tokens_per_s or 0.0
    used = held / (evidence.total_gib or 1.0) if evidence.on_gpu and evidence.total_gib else 0.0
    rows = evidence.setting("batch.rows_per_device")
    rows, share = rows if isinstance(rows, int) else 0, None
    known = {n: rate for n, rate in evidence.rates_by_rows.items() if n < rows}
    best = max(known, key=known.__getitem__, default=0)
    if now and known and known[best] > FASTER * now:
        share, most = 1 - now / known[best], best
        verdict = f"Micro-batches of {rows} rows reach {now:,.0f} tokens/s. {best} rows reached "
        verdict += f"{known[best]:,.0f} here: the larger ones probably exceed the device's memory."
    elif used >= CLOSE:
        most = min(int(rows * CLOSE / used), rows - 1)
        verdict = (
            f"The tensors take {used:.0%} of the GPU's memory: such a run is about to run out "
        )
        verdict += "of memory, and a driver that moves memory to the host (Windows, WSL) makes it "
        verdict += "many times slower."
    else:
        return None
    harm: Harm = "slows" if used > 1 or share else "warns"
    fixes = less_memory(evidence, most, share)
    return Finding(verdict=verdict, harm=harm, share=share, fixes=fixes)


@rule(site="kept", shows=("growth_bytes", "kept_graphs"))
def growing_memory(evidence: Evidence) -> Finding | None:
    """Each step keeps memory: its graph, or something else."""
    growth, by = evidence.growth_bytes or 0.0, f" by {evidence.kept_by}" if evidence.kept_by else ""
    if (evidence.kept_graphs or 0.0) > MOST_KEPT:
        verdict = f"The graph of each step is kept{by}, so memory and time grow with the steps."
        text = "Keep numbers, not tensors with gradients: add loss.item() or loss.detach()."
        return Finding(verdict=verdict, harm="spoils", fixes=(fix(text),))
    if growth <= 0 or evidence.optimizer == "LBFGS":  # whose history grows to its length
        return None
    verdict = f"Each step takes {growth / 2**20:.2g} MiB of memory that it does not return."
    text = "Look for a list, a cache or an attribute that grows in the loop."
    return Finding(verdict=verdict, harm="warns", fixes=(fix(text),))
