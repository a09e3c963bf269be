"""Matmuls in bfloat16 on a CPU with instructions for it. Everything else stays fp32."""

from flatout.assembly.recipe import On, Precision, Speedup, Tolerance, first_of, lazy, needs_cpu

SPEEDUP = Speedup(
    name="bf16-products",
    fills={
        "precision": Precision("bf16"),
        "ops.attention": lazy("flatout.ops.attention:bf16"),
        "ops.linear": lazy("flatout.ops.linear:bf16"),
        "ops.cross_entropy": lazy("flatout.ops.cross_entropy:bf16"),
        "ops.newton_schulz": lazy("flatout.ops.newton_schulz:bf16"),
    },
    saves="time: matmuls run at twice the rate of fp32, and unlike with autocast everything else "
    "stays in fp32, which is faster on a CPU",
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
