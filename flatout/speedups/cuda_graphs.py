"""Record the compiled model's kernels once, and launch them as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.assembly.recipe import Off, Speedup, Tolerance, first_of, needs_gpu, zero_in_place
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel


MOST_LAYERS = 16
"""The deepest model of which a graph is recorded: deeper ones are compiled layer by layer."""


def _record(model: LanguageModel, _mesh: object) -> LanguageModel:
    """Compile the whole model in place, as compile does, with the compiler's CUDA graphs.

    A graph writes its results to the same memory at each launch, so the compiler must be told when
    the previous ones are no longer needed: at every call of the model. By then a step has added the
    last loss to its sum, in stream order, and gradients have been added to memory that no graph
    owns (`zero_in_place`).
    """
    import torch

    next_step: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
    model.compile(dynamic=False, options={"triton.cudagraphs": True})
    recorded: Any = model._compiled_call_impl

    def call(*args: object, **kwargs: object) -> object:
        next_step()
        return recorded(*args, **kwargs)

    model._compiled_call_impl = call
    return model


def _when_deep(_machine: Machine, config: RunConfig) -> str | None:
    layers = int(config.model.own().get("num_layers") or 0)
    if layers > MOST_LAYERS:
        return (
            f"A graph is recorded of the whole model, and one of {layers} layers takes minutes to "
            "compile, where `compile` compiles layer by layer."
        )
    return None


def _with_processes(_machine: Machine, config: RunConfig) -> str | None:
    replicate = config.parallel.replicate
    if config.parallel.is_sharded:
        return (
            "parallel.shard, parallel.tensor and parallel.offload move tensors inside the model, "
            "where no graph can be recorded."
        )
    if replicate != "auto" and replicate > 1:
        return (
            "CUDA graphs have not been tested with DDP, which keeps gradients in its own buffers."
        )
    return None


SPEEDUP = Speedup(
    name="cuda-graphs",
    fills={"zero_grad": zero_in_place, "cuda_graphs": _record},
    saves="time where kernels are short: the host launches one graph, not hundreds of kernels, "
    "but the memory of gradients and activations stays reserved",
    tolerance=Tolerance.rounding(rtol=1e-3),
    needs=("compile",),
    compiles=True,
    why_not=first_of(needs_gpu("Recording CUDA graphs"), _with_processes, _when_deep),
    rank=920,
    auto={
        "cuda": Off(
            "no gain has been shown for models of 100M parameters and more", from_minutes=2
        ),
    },
)
