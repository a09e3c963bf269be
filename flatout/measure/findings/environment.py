"""An environment variable slows training down, or has no effect any more."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

OFF = frozenset({"", "0", "false", "off", "no"})
ON_A_GPU = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every single kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is requested from the driver",
}
"""Variables that slow a GPU down, and how."""
ANYWHERE = {
    "PYTHONTRACEMALLOC": "Python records every allocation",
    "PYTHONDEVMODE": "Python checks everything that it does",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
}
"""Variables that slow down any device, and how."""
WITHOUT_EFFECT = {
    "PYTORCH_CUDA_ALLOC_CONF": "write PYTORCH_ALLOC_CONF",
    "TORCH_CUDNN_V8_API_ENABLED": "remove it",
}
"""Names of the past, and what to do."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when such a variable is set."""
    stated = evidence.host.environment
    if not stated:
        return None
    harmful = _harmful(stated, on_gpu=evidence.on_gpu)
    if harmful:
        name, why = next(iter(harmful.items()))
        return Finding(
            verdict=f"{name}={stated[name]} is set: {why}.",
            harm="slows",
            figures={name: stated[name] for name in harmful},
            fixes=(Fix(text=f"Unset {' '.join(harmful)}, which is for debugging."),),
        )
    old = {name: fix for name, fix in WITHOUT_EFFECT.items() if name in stated}
    if not old or not evidence.on_gpu:
        return None
    name, fix = next(iter(old.items()))
    return Finding(
        verdict=f"{name} is an outdated name.",
        harm="warns",
        figures={name: stated[name]},
        fixes=(Fix(text=f"{fix[0].upper()}{fix[1:]}."),),
    )


def _harmful(stated: Mapping[str, str], *, on_gpu: bool) -> dict[str, str]:
    """Return the variables that are set and slow training down, with how."""
    known = ANYWHERE | (ON_A_GPU if on_gpu else {})
    found = {
        name: why
        for name, why in known.items()
        if name in stated and stated[name].lower() not in OFF
    }
    if stated.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "OFF":
        found.pop("TORCH_DISTRIBUTED_DEBUG", None)
    if on_gpu and stated.get("NVIDIA_TF32_OVERRIDE") == "0":
        found["NVIDIA_TF32_OVERRIDE"] = "products in fp32 cannot use TF32"
    return found


FINDING = FindingRule(name="environment", look=look)
