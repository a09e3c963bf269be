"""Run Muon's iterations through torch.compile, on all matrices of one shape at once."""

from __future__ import annotations

from flatout.assembly.conditions import without_compiler
from flatout.assembly.recipe import Off, On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    kind = config.optim.kind
    if kind != "muon":
        return f"It only applies to Muon, and optim.kind={kind}."
    return without_compiler(machine, config)


SPEEDUP = Speedup(
    name="compiled-muon",
    fills={"ops.newton_schulz": lazy("flatout.ops.newton_schulz:compiled")},
    saves="time: as batched-muon, with one call per shape and the work between matmuls fused "
    "into one pass",
    promise=Promise.rounding(rtol=1e-3),
    compiles=True,
    why_not=_why_not,
    rank=320,
    auto={
        "cpu": Off("compiling is slow on a CPU", from_minutes=2),
        "cuda": On(
            "it fuses Muon's operations, as compile fuses the model's",
            from_minutes=2,
            with_any=("compile", "compile-blocks"),
        ),
    },
)
