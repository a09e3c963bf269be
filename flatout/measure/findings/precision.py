"""The run multiplies matrices in an arithmetic that is slow or fragile on this GPU."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

BF16 = Fix(
    text="Use bf16: train.precision=bf16.",
    overrides={"train.precision": "bf16"},
    same_result=False,
)


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the GPU could do better."""
    config, gpu = evidence.config, evidence.gpu
    if config is None or gpu is None or not gpu.supports_bf16 or not evidence.on_gpu:
        return None
    if config.train.precision == "fp16":
        return Finding(
            verdict="float16 needs its loss scaled and can overflow; this GPU multiplies bfloat16 "
            "just as fast, with the range of float32.",
            harm="warns",
            fixes=(BF16,),
        )
    if config.train.precision == "fp32" and "tf32" not in (evidence.speedups or ("tf32",)):
        return Finding(
            verdict="Matrices are multiplied in float32, which uses a small part of this GPU.",
            harm="slows",
            fixes=(
                BF16,
                Fix(
                    text="Or multiply in TF32: add the speedup tf32.",
                    overrides={"speedups": "+tf32"},
                ),
            ),
        )
    return None


FINDING = FindingRule(name="precision", look=look)
