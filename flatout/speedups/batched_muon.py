"""Run Muon's iterations on all matrices of one shape at once."""

from __future__ import annotations

from flatout.assembly.recipe import On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    kind = config.optim.kind
    return None if kind == "muon" else f"It only applies to Muon, and optim.kind={kind}."


SPEEDUP = Speedup(
    name="batched-muon",
    fills={"ops.newton_schulz": lazy("flatout.ops.newton_schulz:batched")},
    saves="time: 15 matmuls per shape and step instead of 15 per matrix",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=310,
    auto={
        "cpu": On(measured=True),
        "cuda": On(),
    },
)
