"""The machine: its cores, its environment, a GPU that runs slowly."""

from __future__ import annotations

from flatout.measure.rules import Finding, Harm, fix, rule
from flatout.measure.rules.table import work_s
from flatout.measure.steps.evidence import Evidence
from flatout.progress import counted

MIN_BUSY_CORES, MIN_BUSY_SHARE = 0.5, 0.1
"""Cores that other processes must keep busy, and the share of a recorded run in which they must."""
CLEAR_GAIN = 0.1
"""Share of the step that more threads could save, at most, from which few are a finding."""
OFF = frozenset({"", "0", "false", "off", "no"})
HARMFUL_ON_A_GPU = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every single kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is requested from the driver",
}
"""Variables that slow a GPU down, and how."""
HARMFUL = {
    "PYTHONTRACEMALLOC": "Python records every allocation",
    "PYTHONDEVMODE": "Python checks everything that it does",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
}
"""Variables that slow down any device, and how."""
CAPPED, SLOWER = 0.95, 0.9
"""Power limit, as a share of the default, below which it counts as lowered. Share of the highest
clock rate below which a power cap counts: all large GPUs reach it.
"""


@rule(shows=("other_busy_cores",))
def busy_machine(evidence: Evidence) -> Finding | None:
    """Other processes use the cores on which the run computes."""
    others, cores = evidence.other_busy_cores or 0.0, evidence.cores or 0
    threads, lasting = evidence.threads or 1, evidence.busy_share or 1.0
    left = max(cores - others, 0.0)
    is_busy = others >= MIN_BUSY_CORES and lasting >= MIN_BUSY_SHARE and left < threads
    if evidence.device != "cpu" or not cores or not is_busy:
        return None
    when = f" for {lasting:.0%} of the run" if lasting < 1 else ""
    verdict = f"Other processes keep {others:.1f} of {cores} cores busy{when}, which leaves "
    verdict += f"{left:.1f} for {counted(threads, 'thread')}. Rates measured then are too low."
    text = "Stop them, or wait."
    if threads > 1:
        text = "Stop them, or set OMP_NUM_THREADS=1: threads that wait for each other are slower."
    return Finding(verdict=verdict, share=(1 - left / threads) * lasting, fixes=(fix(text),))


@rule(site="threads", shows=("threads", "cores"))
def cpu_threads(evidence: Evidence) -> Finding | None:
    """Operations on the CPU use fewer threads than there are cores, or more."""
    threads, cores, share = evidence.threads or 0, evidence.cores or 0, None
    if evidence.device != "cpu" or not threads or not cores or evidence.world_size > 1:
        return None  # several processes share the cores
    spare = cores - threads
    if spare == 0 or (spare > 0 and (evidence.other_busy_cores or 0.0) > spare - 0.5):
        return None  # the other cores are busy
    verdict = f"torch uses {threads} threads on {cores} cores."
    if spare > 0 and evidence.step_s:
        lost_s = (work_s(evidence) + (evidence.optimizer_s or 0.0)) * spare / cores
        share = evidence.share(lost_s, CLEAR_GAIN)
        if share is None:
            return None
        verdict = f"torch uses {threads} of {cores} cores: all of them save up to {share:.0%} of "
        verdict += "each step."
    stated = sorted({*evidence.environment} & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"})
    text = f"Set OMP_NUM_THREADS={cores}, or call torch.set_num_threads({cores})."
    text = f"Unset {' and '.join(stated)}." if stated else text
    return Finding(verdict=verdict, share=share, fixes=(fix(text),))


@rule()
def environment(evidence: Evidence) -> Finding | None:
    """An environment variable slows training down."""
    stated = evidence.environment
    known = HARMFUL | (HARMFUL_ON_A_GPU if evidence.on_gpu else {})
    harmful = {name: why for name, why in known.items() if stated.get(name, "").lower() not in OFF}
    if evidence.on_gpu and stated.get("NVIDIA_TF32_OVERRIDE") == "0":
        harmful["NVIDIA_TF32_OVERRIDE"] = "matmuls in fp32 cannot use TF32"
    if not harmful:
        return None
    verdict = "; ".join(f"{name}={stated[name]} is set: {why}" for name, why in harmful.items())
    text = f"Unset {' '.join(harmful)}, which is meant for debugging."
    return Finding(verdict=f"{verdict}.", fixes=(fix(text),))


@rule()
def precision(evidence: Evidence) -> Finding | None:
    """Matmuls use a precision that is slow or numerically fragile on this GPU."""
    stated, speedups = evidence.setting("train.precision"), evidence.speedups
    if not evidence.supports_bf16 or not evidence.on_gpu:
        return None
    text, overrides = "Use bf16: train.precision=bf16.", {"train.precision": "bf16"}
    bf16 = fix(text, overrides=overrides, same_result=False)
    if stated == "fp16":
        verdict = "float16 needs its loss scaled and can overflow. This GPU multiplies bfloat16 "
        verdict += "just as fast, with the range of float32."
        return Finding(verdict=verdict, harm="warns", fixes=(bf16,))
    if stated != "fp32" or speedups is None or "tf32" in speedups:
        return None
    verdict = "Matrices are multiplied in float32, which uses a small part of this GPU."
    tf32 = fix("Or multiply in TF32: add the speedup tf32.", overrides={"speedups": "+tf32"})
    return Finding(verdict=verdict, fixes=(bf16, tf32))


@rule(shows=("clock_share", "power_limit_share", "temperature_c"))
def throttling(evidence: Evidence) -> Finding | None:
    """The GPU runs below its clock rate: power cap, heat, power supply."""
    reasons, clock = evidence.slowed_by or (), evidence.clock_share or 1.0
    limit = evidence.power_limit_share or 1.0
    harm: Harm = "slows"
    text = "Raise its power limit with `nvidia-smi -pl WATTS`, if you have permission."
    if reasons and (reasons != ("its power cap",) or limit < CAPPED or clock < SLOWER):
        verdict = f"The GPU is slowed down by {' and '.join(reasons)}. It runs at {clock:.0%} of "
        verdict += "its clock."
        if any("heat" in reason for reason in reasons):
            text = "Improve its cooling or airflow."
    elif limit < CAPPED:
        harm, verdict = "warns", f"The GPU's power limit is lowered to {limit:.0%}."
    else:
        return None
    share = max(1 - clock, 0.0) if harm == "slows" else None
    return Finding(verdict=verdict, harm=harm, share=share, fixes=(fix(text),))
