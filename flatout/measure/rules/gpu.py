"""The device: it idles, computes slowly, is shared, or is not used at all."""

from __future__ import annotations

from flatout.hardware.machine import CUDA_TORCH
from flatout.measure.diagnose.diagnosis import (
    Finding,
    Fix,
    Harm,
    fix,
    ms,
    rule,
    speedup_fixes,
    with_rows,
)
from flatout.measure.steps.evidence import Evidence

COMPILE, ADD_COMPILE = {"speedups": "+compile"}, "Compile the model: add the speedup compile."
COMPILE_S = 60.0
"""What compiling costs once."""
IDLE, LOW_UTILISATION = 0.15, 0.6
"""Share of the step from which idling is a finding. Utilisation below which a recorded run, whose
steps were not divided, counts as idle.
"""
SMALL_BATCH_MFU = 0.2
"""Share of the peak below which a small micro-batch is the likely cause."""
TINY, MANY_TINY = 0.25, 300.0
"""Share of the step, and operations per step, from which tiny ones are a finding."""
MEMORY_BOUND, FUSED = 0.35, 0.5
"""Share of the step from which memory-bound operations are a finding, and the share of them that
fusing is assumed to save: each pass reads and writes once less.
"""
SYNCS, MANY_SYNCS = 0.03, 2.0
"""Share of a GPU's step from which reads of tensors are a finding. Reads per step from which they
are mentioned on a CPU, where they cost nothing.
"""
COMMUNICATION = 0.15
"""Share of the step from which communication is a finding."""
MIN_OTHER_GIB = 0.5
"""Memory below which another process only shows something, such as a desktop."""
CAPPED, SLOWER = 0.95, 0.9
"""Power limit, as a share of the default, below which it counts as lowered. Share of the highest
clock rate below which a power cap counts: all large GPUs reach it.
"""


@rule(
    unless=(
        "slow-data",
        "slow-disk",
        "host-sync",
        "tiny-kernels",
        "recompiles",
        "garbage-collection",
        "environment",
        "empty-cache",
        "pageable-copies",
        "small-batch",
    )
)
def idle_gpu(evidence: Evidence) -> Finding | None:
    """The GPU idles while the host prepares its work."""
    share = evidence.share(evidence.phases.host_s)
    used = evidence.gpu.utilisation if evidence.gpu is not None else None
    if share is None and used is not None and used < LOW_UTILISATION:
        share = 1 - used
    if not evidence.on_gpu or share is None or share < IDLE:
        return None
    return Finding(
        verdict=f"The GPU idles {share:.0%} of each step, while Python prepares its work.",
        figures={
            "kernels_per_step": evidence.counts.ops,
            "idle_ms": 1e3 * share * (evidence.step_s or 0.0) or None,
            "utilisation": used,
        },
        share=share,
        site=evidence.site("compute") or evidence.site("python"),
        fixes=_less_overhead(evidence, share),
    )


def _less_overhead(evidence: Evidence, share: float) -> list[Fix]:
    """Return what makes the host's work per step smaller."""
    if evidence.config is None:
        text = "Compile the model (`torch.compile`), or do more work per step."
        return [fix(text, share, "the step without the idle time", cost_s=COMPILE_S)]
    fixes = []
    if evidence.lacks("compile"):
        text, why = ADD_COMPILE, "the step without the host's overhead"
        fixes.append(fix(text, share, why, overrides=COMPILE, cost_s=COMPILE_S))
    batch, most = evidence.config.batch, evidence.memory.rows_that_fit
    accumulate, rows = batch.accumulate or 1, batch.rows_per_device
    if accumulate > 1 and isinstance(rows, int) and (most is None or most >= 2 * rows):
        more = next(each for each in range(2, accumulate + 1) if accumulate % each == 0)
        fixes.append(
            fix(
                f"Use a larger micro-batch: batch.rows_per_device={more * rows} (the tokens per "
                "step stay the same).",
                share * (1 - 1 / more),
                "the host's overhead, shared by more rows",
                overrides=with_rows(evidence.config, more * rows),
            )
        )
    return fixes or [fix("Use larger micro-batches, or a larger model per step.")]


@rule(unless=("slow-data", "slow-disk", "host-sync"))
def small_batch(evidence: Evidence) -> Finding | None:
    """Micro-batches are small for the GPU, which has room for larger ones."""
    config, mfu, most = evidence.config, evidence.roofline.mfu, evidence.memory.rows_that_fit
    if not evidence.on_gpu or config is None or mfu is None or mfu > SMALL_BATCH_MFU:
        return None
    rows, accumulate = config.batch.rows_per_device, config.batch.accumulate or 1
    if not isinstance(rows, int) or most is None or most < 2 * rows or accumulate < 2:
        return None
    idle = evidence.share(evidence.phases.host_s) or 0.0
    fixes = _less_overhead(evidence, idle)
    return Finding(
        verdict=f"Micro-batches of {rows} rows reach {mfu:.0%} of the GPU's peak, "
        f"but {most} rows fit.",
        figures={"mfu": mfu, "rows_per_device": rows, "rows_that_fit": most},
        share=idle or None,
        fixes=[one for one in fixes if "batch.rows_per_device" in one.overrides],
    )


@rule(unless=("slow-code", "slow-optimizer", "few-rows"))
def tiny_kernels(evidence: Evidence) -> Finding | None:
    """A step consists of many tiny operations, which take longer to start than to run."""
    found, idle_s = evidence.counts, evidence.phases.host_s
    lost_s = found.tiny_op_s
    if found.tiny_ops is None or found.tiny_ops < MANY_TINY or lost_s is None:
        return None
    if evidence.on_gpu:  # they only cost time where the device waits for the next one
        lost_s = None if idle_s is None else min(lost_s, idle_s)
    share = evidence.lost(lost_s, TINY)
    if share is None:
        return None
    site = evidence.site("op") or evidence.site("compute") or evidence.site("python")
    fixes = _less_overhead(evidence, share)
    if site is not None:
        text = f"Compute {site.describe()} for all elements at once instead of one by one."
        fixes.insert(0, fix(text, share, "the step without the tiny operations"))
    return Finding(
        verdict=f"{share:.0%} of each step goes into {found.tiny_ops:,.0f} tiny operations, which "
        "take longer to start than to run.",
        figures={
            "tiny_ops_per_step": found.tiny_ops,
            "ops_per_step": found.ops,
            "tiny_ops_ms": ms(found.tiny_op_s),
            "step_ms": ms(evidence.step_s),
        },
        share=share,
        site=site,
        fixes=fixes,
    )


@rule()
def memory_bound(evidence: Evidence) -> Finding | None:
    """The GPU spends much of each step on elementwise work that torch.compile would fuse."""
    share = evidence.lost(evidence.phases.memory_bound_s, MEMORY_BOUND)
    compiled = any(name.startswith("compile") for name in evidence.speedups or ())
    if not evidence.on_gpu or share is None or compiled:
        return None
    kinds = sorted(evidence.kernels or (), key=lambda kind: -kind.seconds)
    is_ours = evidence.config is not None
    how = "add the speedup compile" if is_ours else "torch.compile(model)"
    text, why = f"Compile the model, which fuses them: {how}.", "half of their time: fused "
    why += "operations read and write memory once"
    overrides = COMPILE if is_ours else {}
    return Finding(
        verdict=f"{share:.0%} of each step goes into operations that move memory and hardly "
        "compute.",
        figures={f"{kind.kind}_ms": ms(kind.seconds) for kind in kinds[:5]},
        share=share * FUSED,
        site=evidence.site("compute"),
        fixes=[fix(text, share * FUSED, why, overrides=overrides, cost_s=COMPILE_S)],
    )


@rule()
def host_sync(evidence: Evidence) -> Finding | None:
    """User code reads values of tensors in every step, which makes the host wait for the GPU."""
    found, idle_s, site = evidence.counts, evidence.phases.host_s, evidence.site("sync")
    reads = (found.syncs or 0.0) - (found.expected_syncs or 0.0)
    where = f" at {site.describe()}" if site is not None else ""
    harm: Harm = "warns"
    share = None
    figures: dict[str, float | None] = {"reads_per_step": reads}
    if evidence.on_gpu:
        if reads < 1 or idle_s is None or found.sync_s is None:
            return None
        harm, share = "slows", evidence.lost(min(idle_s, found.sync_s), SYNCS)
        if share is None:
            return None
        figures |= {"waits_ms": ms(found.sync_s), "idle_ms": ms(idle_s)}
        verdict = (
            f"{share:.0%} of each step is lost to {reads:.0f} reads of tensors{where}: the host "
            "waits for the GPU, and then the GPU for the host."
        )
    elif reads < MANY_SYNCS or evidence.source == "script":
        return None
    else:
        verdict = (
            f"Each step reads {reads:.0f} values of tensors{where}. On a CPU that costs little. On "
            "a GPU each makes the host wait."
        )
    text = "Keep values on the device, and read them every few steps, one step late."
    return Finding(
        verdict=verdict,
        harm=harm,
        figures=figures,
        share=share,
        site=site,
        fixes=[fix(text, share, "the time at which the GPU idles in these waits")],
    )


@rule()
def communication(evidence: Evidence) -> Finding | None:
    """Processes wait for each other's gradients or weights."""
    share = evidence.lost(evidence.phases.communication_s, COMMUNICATION)
    if share is None or evidence.world_size < 2:
        return None
    text = "Accumulate more micro-batches per step, so that gradients travel less often."
    fewer = fix(text, share / 2, "half as many exchanges per token", same_result=False)
    once = speedup_fixes(evidence, "grad_sync", "Exchange gradients once per step")
    return Finding(
        verdict=f"{share:.0%} of each step waits for communication between {evidence.world_size} "
        "processes.",
        figures={
            "communication_ms": ms(evidence.phases.communication_s),
            "processes": evidence.world_size,
        },
        share=share,
        fixes=[*once, fewer],
    )


@rule()
def precision(evidence: Evidence) -> Finding | None:
    """Matmuls use a precision that is slow or numerically fragile on this GPU."""
    stated, gpu = evidence.setting("train.precision"), evidence.gpu
    if gpu is None or not gpu.supports_bf16 or not evidence.on_gpu:
        return None
    overrides = {"train.precision": "bf16"}
    bf16 = fix("Use bf16: train.precision=bf16.", overrides=overrides, same_result=False)
    if stated == "fp16":
        return Finding(
            verdict="float16 needs its loss scaled and can overflow. This GPU multiplies bfloat16 "
            "just as fast, with the range of float32.",
            harm="warns",
            fixes=[bf16],
        )
    if stated != "fp32" or "tf32" in (evidence.speedups or ("tf32",)):
        return None
    text = "Or multiply in TF32: add the speedup tf32."
    return Finding(
        verdict="Matrices are multiplied in float32, which uses a small part of this GPU.",
        fixes=[bf16, fix(text, overrides={"speedups": "+tf32"})],
    )


@rule()
def deterministic(evidence: Evidence) -> Finding | None:
    """train.deterministic makes a run on a GPU slower."""
    if not evidence.on_gpu or not evidence.setting("train.deterministic"):
        return None
    text = "Remove it, unless two runs must be bit-identical."
    overrides = {"train.deterministic": False}
    return Finding(
        verdict="train.deterministic=true uses slower operations on a GPU.",
        harm="warns",
        fixes=[fix(text, overrides=overrides, same_result=False)],
    )


@rule()
def cpu_by_mistake(evidence: Evidence) -> Finding | None:
    """The run is on the CPU although the machine has a GPU."""
    host, machine = evidence.host, evidence.machine
    names = [gpu.name for gpu in machine.gpus] if machine is not None else []
    if evidence.device != "cpu" or not (names or host.sees_gpu):
        return None
    reason = host.no_gpu_because or "the model and its batches are on the CPU"
    if reason == "requested":
        reason = "train.device=cpu asks for it"
    advice = fix("Check that the driver works (`nvidia-smi`) and suits this torch.")
    if host.sees_gpu and evidence.config is None:
        advice = fix('Move the model and every batch to the GPU: `.to("cuda")`.')
    elif host.sees_gpu:
        overrides = {"train.device": "auto"}
        advice = fix("Remove train.device=cpu.", overrides=overrides, same_result=False)
    elif host.torch_version is not None and host.torch_cuda is None:
        advice = fix(f"Install a torch for CUDA: `{CUDA_TORCH}`.")
    elif "CUDA_VISIBLE_DEVICES" in (host.environment or {}):
        advice = fix("Unset CUDA_VISIBLE_DEVICES, which hides the GPU from torch.")
    gpu = names[0] if names else "a GPU that torch can use"
    return Finding(
        verdict=f"The run is on the CPU, but this machine has {gpu}: {reason}.",
        figures={"torch": host.torch_version, "torch_cuda": host.torch_cuda},
        fixes=[advice],
    )


@rule()
def gpu_shared(evidence: Evidence) -> Finding | None:
    """Other processes use the same GPU."""
    gpu = evidence.gpu
    if gpu is None or not gpu.other_processes or (gpu.other_memory_gib or 0.0) < MIN_OTHER_GIB:
        return None
    count = gpu.other_processes
    who = "1 other process on this GPU holds"
    if count > 1:
        who = f"{count} other processes on this GPU hold"
    return Finding(
        verdict=f"{who} {gpu.other_memory_gib:.1f} GiB of its memory, and may take its time.",
        harm="warns",
        figures={"processes": count, "memory_gib": gpu.other_memory_gib},
        fixes=[fix("End them (`nvidia-smi` lists them), or use a different GPU.")],
    )


@rule()
def throttling(evidence: Evidence) -> Finding | None:
    """The GPU runs below its clock rate: power cap, heat, power supply."""
    gpu = evidence.gpu
    if gpu is None:
        return None
    reasons, clock = gpu.slowed_by or (), gpu.clock_share
    lowered = gpu.power_limit_share is not None and gpu.power_limit_share < CAPPED
    if reasons == ("its power cap",) and not lowered and (clock or 1.0) >= SLOWER:
        reasons = ()
    harm: Harm = "slows"
    share = None
    text = "Raise its power limit with `nvidia-smi -pl WATTS`, if you have permission."
    if reasons:
        share = None if clock is None else max(1 - clock, 0.0)
        at = "" if clock is None else f" It runs at {clock:.0%} of its clock."
        verdict = f"The GPU is slowed down by {' and '.join(reasons)}.{at}"
        if any("heat" in reason for reason in reasons):
            text = "Improve its cooling or airflow."
    elif lowered:
        harm = "warns"
        verdict = f"The GPU's power limit is lowered to {gpu.power_limit_share:.0%}."
        text = "Raise it with `nvidia-smi -pl WATTS`, if you have permission."
    else:
        return None
    return Finding(
        verdict=verdict,
        harm=harm,
        figures={
            "clock_share": clock,
            "power_limit_share": gpu.power_limit_share,
            "temperature_c": gpu.temperature_c,
        },
        share=share,
        fixes=[fix(text)],
    )
