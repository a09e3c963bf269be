"""Matmuls and what they return in bfloat16, on a CPU with instructions for it. The rest is fp32."""

from flatout.assembly.parts import Parts, Precision, named
from flatout.assembly.speedup import On, Speedup, Tolerance, first_of, needs_cpu


def apply(parts: Parts) -> None:
    """Round the factors of matmuls to bfloat16."""
    parts.precision = Precision("bf16")
    parts.attention = named("flatout.ops.attention:bf16")
    parts.linear = named("flatout.ops.linear:bf16")
    parts.cross_entropy = named("flatout.ops.cross_entropy:bf16")
    parts.newton_schulz = named("flatout.ops.newton_schulz:bf16")


SPEEDUP = Speedup(
    name="bf16-products",
    apply=apply,
    saves="time: matmuls run at twice the rate of fp32, and what they return and the hidden states "
    "of a transformer take 2 bytes, while weights and sums stay in fp32",
    tolerance=Tolerance.rounding(rtol=2e-2),
    why_not=first_of(
        needs_cpu,
        lambda machine, _config: (
            None
            if machine.cpu_multiplies_bf16
            else "This processor has no bfloat16 instructions (AVX512-BF16 or AMX)."
        ),
    ),
    rank=280,
    auto={"cpu": On(measured=True)},
)
