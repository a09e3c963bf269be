"""torch.compile of a model: as a whole, by layer or with CUDA graphs, and how long it takes.

Compiling takes half a minute, and loading compiled code a few seconds. A mark in torch's cache of
compiled code tells for which runs it holds any: `auto` then compiles shorter runs too. A mark is
deleted together with the code. If it is wrong, because a detail that it does not state has changed,
the run compiles again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import torch

from flatout.config.schema import RunConfig
from flatout.distributed.mesh import Mesh
from flatout.hardware.machine import BUSY_CORES, fingerprint, other_busy_cores, usable_cores
from flatout.models.language_model import LanguageModel

MOST_WHOLE = {"cpu": 6, "cuda": 16}
"""Layers of the deepest model that is compiled as a whole: on a CPU, one of 12 is 1 to 3% faster as
a whole, and takes 20 seconds more to compile.
"""
MEASURED_FROM = 1
"""Minutes of a run that is compiled on an idle machine."""
CACHED = 0.1
"""Time of loading compiled code, relative to compiling."""
LEAST_FREE = 0.1
"""Share of the cores that is taken to be free on the busiest machine."""


def compile_model(model: LanguageModel, mesh: Mesh) -> None:
    """Compile in place, which keeps parameter names. By layer if it is wrapped, or if deep.

    The hooks of fully_shard break a whole graph. Under DDP, the backward pass of a whole graph is
    one piece: all gradients arrive at its end, and their synchronisation overlaps with nothing. By
    layer, it starts with those of the last one. torch's own remedy (`optimize_ddp`) splits the
    graph of what is compiled inside DDP's forward, which the warm-up avoids, and no graph that
    contains a higher-order operation such as flex-attention. Compiling a whole model takes time in
    proportion to its layers, minutes for 48; by layer, all of one shape share a graph.
    """
    is_wrapped = mesh.world_size > 1 or mesh.device_mesh is not None
    if is_wrapped or len(model.layers) > MOST_WHOLE.get(mesh.device.type, 0):
        compile_layers(model, mesh)
    else:
        model.compile(dynamic=False)


def compile_layers(model: LanguageModel, _mesh: Mesh) -> None:
    """Compile each layer in place, and the loss, which includes the output projection.

    Embedding and final norm are not compiled. The loss takes its weight as an argument, so that no
    graph guards a parameter that fully_shard gathers and frees.
    """
    for layer in model.layers:
        layer.compile(dynamic=False)
    compiled = torch.compile(model.ops.cross_entropy, dynamic=False)
    model.set_ops(replace(model.ops, cross_entropy=compiled))


def record_graphs(model: LanguageModel, _mesh: Mesh) -> None:
    """Compile the whole model in place, with the compiler's CUDA graphs.

    A graph writes its results to the same memory at each launch, so the compiler must be told when
    the previous ones are no longer needed: at every call of the model. By then a step has added the
    last loss to its sum, in stream order, and gradients have been added to memory that no graph
    owns (`zero_in_place`).
    """
    next_step: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
    model.compile(dynamic=False, options={"triton.cudagraphs": True})
    recorded: Any = model._compiled_call_impl

    def call(*args: object, **kwargs: object) -> object:
        next_step()
        return recorded(*args, **kwargs)

    model._compiled_call_impl = call


def undo(model: LanguageModel) -> None:
    """Make a compiled model run as written. There is no public function for it."""
    for module in model.modules():
        module._compiled_call_impl = None
    plain_loss = torch._dynamo.eval_frame.innermost_fn(model.ops.cross_entropy)
    model.set_ops(replace(model.ops, cross_entropy=plain_loss))
    torch._dynamo.reset()


def known_processor() -> AbstractContextManager[object]:
    """Return a context in which the compiler tests no vector instructions that torch itself uses.

    It would compile a program for each set of them, with torch's headers, and start each.
    """
    is_known = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    changed: AbstractContextManager[object]
    changed = torch._inductor.config.patch({"cpp.vec_isa_ok": is_known or None})
    return changed


def compile_cost(config: RunConfig, minutes: float | None) -> float:
    """Return the time of compiling relative to an idle machine without the code of this run.

    It is 1 where it may not depend on that: with `train.deterministic`, and with dropout, of which
    compiled code draws other numbers. The load of the machine is measured for a run of at least
    MEASURED_FROM minutes.
    """
    if config.train.deterministic or config.dropout:
        return 1.0
    with suppress(OSError):
        if _mark(config).exists():
            return CACHED
    others = other_busy_cores() if (minutes or 0) >= MEASURED_FROM else 0.0
    return 1 / max(1 - others / usable_cores(), LEAST_FREE) if others > BUSY_CORES else 1.0


def mark_as_cached(config: RunConfig) -> None:
    """Record that the code of a run has been compiled. A cache that is read-only stays unmarked."""
    with suppress(OSError):
        mark = _mark(config)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()


def _mark(config: RunConfig) -> Path:
    """Return the mark of a run, whose speedups may be resolved or not."""
    # as a file: importing it as a module imports the compiler
    utilities = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    cache_dir = run_path(str(utilities))["cache_dir"]
    stated = [
        import_module("flatout").__version__,  # which need not be installed
        fingerprint(config.train.device),
        *(config.model.model_dump(), config.lora.model_dump(), config.parallel.model_dump()),
        *(config.data.seq_len, config.data.document_mask, config.batch.tokens_per_step),
    ]
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()
    return Path(cache_dir()) / "flatout" / digest[:32]
