"""Muon's iterations through torch.compile, on all matrices of one shape at once."""

from __future__ import annotations

from flatout.assembly.recipe import Off, On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine
from flatout.speedups.compile_blocks import without_compiler


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    return (
        without_compiler(machine, config)
        if config.optim.kind == "muon"
        else f"It is for Muon, and optim.kind={config.optim.kind}."
    )


SPEEDUP = Speedup(
    name="compiled-muon",
    fills={"ops.newton_schulz": lazy("flatout.ops.newton_schulz:compiled")},
    saves="time: as batched-muon, with one call a shape, and one pass for what lies between the products",
    promise=Promise.rounding(rtol=1e-3),
    compiles=True,
    why_not=_why_not,
    rank=320,
    auto={
        "cpu": Off("compiling takes long on a CPU", from_minutes=2),
        "cuda": On(
            "what compile fuses in the model it fuses here",
            from_minutes=2,
            with_any=("compile", "compile-blocks"),
        ),
    },
)
