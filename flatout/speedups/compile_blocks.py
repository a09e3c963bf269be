"""torch.compile by block: blocks of one shape share one graph, so that compiling takes no longer
for a deep model.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from flatout.assembly.conditions import uses_gpu
from flatout.assembly.recipe import Off, Promise, Speedup, Transform
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def compile_blocks(model: Any, mesh: Any) -> Any:
    """Compile each block in place, and the loss from the last hidden states on; embedding and final
    norm stay as they are.

    The loss is handed its weight, so that no graph looks after a parameter that fully_shard gathers
    and drops.
    """
    import torch

    options = dict(model.compiler_options) or None
    for block in model.blocks:
        block.compile(dynamic=False, options=options)
    model.ops = replace(
        model.ops,
        cross_entropy=torch.compile(model.ops.cross_entropy, dynamic=False, options=options),
    )
    return model


def without_compiler(machine: Machine, config: RunConfig) -> str | None:
    """Return why torch.compile cannot work here, None when it can."""
    if not uses_gpu(machine, config) and not (shutil.which("g++") or shutil.which("clang++")):
        return "On a CPU torch.compile needs a C++ compiler: apt install g++."
    return None


SPEEDUP = Speedup(
    name="compile-blocks",
    fills={"compilation": "each block"},
    transform=Transform("compile", compile_blocks),
    saves="time, as compile does but for what is fused across blocks; compiling takes as long for 48 blocks as for one",
    promise=Promise.rounding(rtol=1e-3),
    compiles=True,
    why_not=without_compiler,
    rank=940,
    auto={
        "cpu": Off(
            "compile fuses more; name it where compiling a deep model takes too long",
            from_minutes=2,
        ),
        "cuda": Off(
            "compile fuses more: name it where compiling a deep model takes too long",
            from_minutes=2,
        ),
    },
)
