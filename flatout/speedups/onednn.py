"""Run fp32 matmuls of the model, its loss and Muon through oneDNN instead of MKL, on a CPU."""

from flatout.assembly.recipe import On, Speedup, Tolerance, first_of, lazy, needs_cpu

SPEEDUP = Speedup(
    name="onednn",
    fills={
        "ops.linear": lazy("flatout.ops.linear:onednn"),
        "ops.cross_entropy": lazy("flatout.ops.cross_entropy:onednn"),
        "ops.newton_schulz": lazy("flatout.ops.newton_schulz:onednn"),
    },
    saves="time: matmuls use 512-bit vectors on processors where torch's MKL uses 256-bit ones",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=first_of(
        needs_cpu,
        lambda _machine, config: (
            None
            if config.train.precision in ("auto", "fp32")
            else f"It only applies to fp32 matmuls, but train.precision={config.train.precision}."
        ),
    ),
    rank=290,
    auto={"cpu": On(measured=True)},
)
