"""The machine: its cores, its environment, its GPU and its memory."""

from __future__ import annotations

from flatout.measure.evidence import Evidence
from flatout.measure.rules import Found, Loss, rule

OFF = "0 false off no"
"""Values with which a variable does nothing. Nothing is one too."""
HARMFUL = {
    "PYTHONTRACEMALLOC": "Python records every allocation",
    "PYTHONDEVMODE": "Python checks everything that it does",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
}
"""Variables that slow down any device, and how."""
HARMFUL_ON_A_GPU = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every single kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is requested from the driver",
}
"""Variables that slow a GPU down, and how."""
CAPPED, SLOWER = 0.95, 0.9
"""Power limit, as a share of the default, below which it counts as lowered. Share of the highest
clock rate below which a power cap counts: all large GPUs reach it.
"""


@rule()
def backend_off(evidence: Evidence) -> Found:
    """A library with which torch computes on this device is turned off."""
    off = "cudnn" if evidence.on_gpu else "mkldnn"
    name = f"torch.backends.{off}.enabled"
    return (
        off in evidence.backends_off and "slows",
        f"{name} is off: convolutions and products run on slower code.",
        (f"Remove the line that turns {name} off. To debug, use it for a few steps only.",),
    )


@rule(site="threads")
def cpu_threads(evidence: Evidence) -> Found | None:
    """Operations on the CPU use fewer threads than there are cores, or more."""
    threads, cores = evidence.threads or 0, evidence.cores or 0
    spare, work_s = cores - threads, evidence.work_s + (evidence.optimizer_s or 0.0)
    is_used = 0 <= spare < (evidence.other_busy_cores or 0.0) + (evidence.worker_cores or 0.0) + 0.5
    if evidence.device != "cpu" or not threads or evidence.world_size > 1 or is_used:
        return None
    few = spare > 0 and evidence.step_s
    return (
        evidence.share(work_s * spare / cores, 0.1) if few else "slows",
        "torch uses {e.threads} as its number of threads, and there are {e.cores} cores.",
        (
            "Set OMP_NUM_THREADS={e.cores}, and no MKL_NUM_THREADS, or call "
            "torch.set_num_threads({e.cores}).",
        ),
    )


@rule()
def environment(evidence: Evidence) -> Found:
    """An environment variable slows training down."""
    known = HARMFUL | (HARMFUL_ON_A_GPU if evidence.on_gpu else {})
    on = {name for name, text in evidence.environment.items() if text.lower() not in OFF}
    harmful = sorted(on & known.keys())
    says = "; ".join(f"{name} is set: {known[name]}" for name in harmful)
    fix = f"Unset {' '.join(harmful)}, which is meant for debugging."
    return harmful and "slows", f"{says}.", (fix,)


@rule(shows="power_limit_share")
def throttling(evidence: Evidence) -> Found:
    """The GPU runs below its clock rate: power cap, heat, power supply."""
    reasons, clock = evidence.slowed_by or (), evidence.clock_share or 1.0
    limit = evidence.power_limit_share or 1.0
    loss: Loss = limit < CAPPED and "warns"
    says = "The GPU's power limit is lowered to {e.power_limit_share:.0%}."
    if reasons and (reasons != ("its power cap",) or loss or clock < SLOWER):
        loss = 1 - clock
        says = f"The GPU runs at {clock:.0%} of its clock, slowed by {' and '.join(reasons)}."
    fix = "Improve its cooling, or raise its limit with `nvidia-smi -pl WATTS` if you may."
    return loss, says, (fix,)
