"""Compile the whole model, record its kernels once, and launch them as one CUDA graph."""

from __future__ import annotations

from flatout.assembly.parts import Parts, named, zero_in_place
from flatout.assembly.speedup import Off, Speedup, Tolerance, first_of, needs_gpu
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

MOST_LAYERS = 16
"""The deepest model of which a graph is recorded: deeper ones are compiled layer by layer."""


def apply(parts: Parts) -> None:
    """Compile with CUDA graphs, whose memory no gradient may take."""
    parts.compilation = named("flatout.assembly.compiling:record_graphs")
    parts.zero_grad = zero_in_place


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    layers = int(config.model.own().get("num_layers") or 0)
    replicate = config.parallel.replicate
    if config.parallel.is_sharded:
        return (
            "parallel.shard, parallel.tensor, parallel.pipeline and parallel.offload move tensors "
            "inside the model, where no graph can be recorded."
        )
    if replicate != "auto" and replicate > 1:
        return (
            "CUDA graphs have not been tested with DDP, which keeps gradients in its own buffers."
        )
    if layers > MOST_LAYERS:
        return (
            f"A graph is recorded of the whole model, and one of {layers} layers takes minutes to "
            "compile, where `compile` compiles layer by layer."
        )
    return None


SPEEDUP = Speedup(
    name="cuda-graphs",
    apply=apply,
    saves="time, as compile, and also where kernels are short: the host launches one graph, not "
    "hundreds of kernels, but the memory of gradients and activations stays reserved",
    tolerance=Tolerance.rounding(rtol=1e-3),
    compiles=True,
    why_not=first_of(needs_gpu("Recording CUDA graphs"), _why_not),
    rank=920,
    auto={
        "cuda": Off(
            "no gain over compile has been shown for models of 100M parameters and more",
            from_minutes=2,
        ),
    },
)
