"""Run fp32 matmuls on tensor cores, with inputs rounded to TF32's 10 bits of mantissa."""

from flatout.assembly.parts import Parts
from flatout.assembly.speedup import On, Speedup, Tolerance, needs_gpu


def apply(parts: Parts) -> None:
    """Allow TF32."""
    parts.matmul = "high"


SPEEDUP = Speedup(
    name="tf32",
    apply=apply,
    saves="time: fp32 matmuls run on tensor cores, as bf16 and fp16 matmuls already do",
    tolerance=Tolerance.rounding(rtol=5e-3),
    why_not=needs_gpu("TF32", (8, 0)),
    rank=210,
    auto={"cuda": On()},
)
