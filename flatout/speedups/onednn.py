"""Run fp32 matmuls of the model, its loss and Muon through oneDNN instead of MKL, on a CPU."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import On, Speedup, Tolerance, first_of, needs_cpu


def apply(parts: Parts) -> None:
    """Multiply with oneDNN."""
    parts.linear = named("flatout.ops.linear:onednn")
    parts.cross_entropy = named("flatout.ops.cross_entropy:onednn")
    parts.newton_schulz = named("flatout.ops.newton_schulz:onednn")


SPEEDUP = Speedup(
    name="onednn",
    apply=apply,
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
