"""Matmuls in float16 (autocast) with dynamic loss scaling, for GPUs without bfloat16."""

from flatout.assembly.parts import Parts, Precision
from flatout.assembly.speedup import Off, On, Speedup, Tolerance


def apply(parts: Parts) -> None:
    """Cast matmuls to float16, and scale the loss."""
    parts.precision = Precision("fp16", autocast="float16", loss_scale=2.0**16)


SPEEDUP = Speedup(
    name="fp16",
    apply=apply,
    saves="time and memory, as bf16, and the loss is scaled so that small gradients do not "
    "underflow, and a step that overflows is skipped",
    tolerance=Tolerance.rounding(rtol=2e-2),
    rank=270,
    auto={
        "cpu": Off(
            "half as fast as bf16-products on a CPU (benchmarks/results/cpu.md)", measured=True
        ),
        "cuda": On(),
    },
)
