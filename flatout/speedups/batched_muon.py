"""Run Muon's iterations on all matrices of one shape at once."""

from flatout.assembly.recipe import On, Speedup, Tolerance, lazy

SPEEDUP = Speedup(
    name="batched-muon",
    fills={"ops.newton_schulz": lazy("flatout.ops.newton_schulz:batched")},
    saves="time: 15 matmuls per shape and step instead of 15 per matrix",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=lambda _machine, config: (
        None
        if config.optim.kind == "muon"
        else f"It only applies to Muon, but optim.kind={config.optim.kind}."
    ),
    rank=310,
    auto={
        "cpu": On(measured=True),
        "cuda": On(),
    },
)
