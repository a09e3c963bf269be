"""The compiled model's kernels recorded once and launched as one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flatout.assembly.conditions import uses_gpu
from flatout.assembly.recipe import Off, Promise, Speedup, Transform
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _record(model: Any, mesh: Any) -> Any:
    """Compile the whole model in place, as compile does, with the compiler's CUDA graphs.

    A graph writes its results to the same memory each time it is launched, so the compiler must be
    told when those of the time before are done with: at every call of the model. By then a step has
    added the last loss to its sum, in the order of the stream, and gradients have been added to
    memory that no graph owns (`zeroed`).
    """
    import torch

    next_step: Any = torch.compiler.cudagraph_mark_step_begin
    model.compile(dynamic=False, options={**model.compiler_options, "triton.cudagraphs": True})
    recorded = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        next_step()
        return recorded(*args, **kwargs)

    model._compiled_call_impl = call
    return model


def zeroed(parameters: Iterable[Any]) -> None:
    """Set the gradients to zero where they lie, and make those that are missing.

    Autograd makes the first gradient that it finds into the parameter's own; one that a graph wrote
    would be overwritten by the next micro-batch. Into a gradient that is there already it adds.
    """
    import torch

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
    if trained:
        torch._foreach_zero_([parameter.grad for parameter in trained])


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    replicate, shard = config.parallel.replicate, config.parallel.shard
    if not uses_gpu(machine, config):
        return "CUDA graphs are for NVIDIA GPUs, and this run is on the CPU."
    if shard > 1:
        return "Under parallel.shard weights move between processes in the middle of the model, where no graph can be recorded."
    if replicate != "auto" and replicate > 1:
        return "Copies of a model exchange gradients in memory of their own, beside which recorded graphs are not tried yet."
    return None


SPEEDUP = Speedup(
    name="cuda-graphs",
    fills={"zero_grad": zeroed},
    transform=Transform("cuda-graphs", _record),
    saves="time where kernels are short: the host launches one graph, not hundreds of kernels; gradients and activations keep their memory",
    promise=Promise.rounding(rtol=1e-3),
    needs=("compile",),
    compiles=True,
    why_not=_why_not,
    rank=920,
    auto={
        "cuda": Off("nobody has shown a gain from them at 100M parameters and more", from_minutes=2)
    },
)
