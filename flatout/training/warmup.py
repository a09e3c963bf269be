"""The first call of whatever is compiled, made before training so that its cost is named and its
failure is harmless.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flatout.assembly.parts import Decision
from flatout.assembly.run import Run
from flatout.assembly.selection import speedup_named
from flatout.progress import SILENT, Progress
from flatout.training.metrics.log import Log

PASSES = 2
"""Of training, in each shape: CUDA graphs are recorded at the second call."""
SHAPES_COMPILED = 64
"""Most static shapes of one function; torch's own limit of 8 is fewer than a run with buckets of
lengths has.
"""


@runtime_checkable
class WarmedUp(Protocol):
    """An optimiser with work that may be compiled."""

    def warm_up(self) -> None:
        """Do that work once, in all its shapes, changing nothing."""

    def give_up_compiling(self) -> None:
        """Do it uncompiled from now on."""


def warm_up(
    run: Run, log: Log, *, eval_shapes: Sequence[tuple[int, int]] = (), progress: Progress = SILENT
) -> None:
    """Compile now: passes of training and of evaluation in the run's own shapes, leaving RNG,
    weights and gradients as they were.

    `eval_shapes` are those of `evaluation.batch_shapes`; a run that never evaluates gives none, and
    compiles no graph for it.

    torch.compile is lazy: its errors come at the first call. If that call fails on any rank and the
    plain code works, the run goes on without anything compiled, and says so.
    """
    compiled = [d.name for d in run.decisions if d.on and speedup_named(d.name).compiles]
    if not compiled:
        return
    began_s = time.perf_counter()
    with progress.task("Compiling the model (once, often 20 to 60 s)"), _compiling():
        failure = _try_step(run, eval_shapes)
    if not float(run.mesh.sum(torch.tensor(float(failure is not None), device=run.mesh.device))[0]):
        log.compiled(time.perf_counter() - began_s)
        return
    _give_up_compiling(run)
    plain_failure = _try_step(run, eval_shapes)
    if plain_failure is not None:
        raise plain_failure
    first_line = str(failure).splitlines()[0] if str(failure) else ""
    reason = (
        f"compiling failed, running eager: {type(failure).__name__}: {first_line}"
        if failure
        else "compiling failed on another rank, running eager"
    )
    run.decisions = [
        Decision(d.name, False, reason) if d.name in compiled else d for d in run.decisions
    ]
    for name in compiled:
        log.event("speedup", name=name, on=False, reason=reason)
    progress.say(reason[0].upper() + reason[1:])


@contextmanager
def _compiling() -> Iterator[None]:
    """Let the compiler take as many shapes as a run has, and keep a warning to itself that is about
    its own doing.
    """
    with torch._dynamo.config.patch(recompile_limit=SHAPES_COMPILED), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def _give_up_compiling(run: Run) -> None:
    """Take back what torch.compile was asked for; there is no public way to."""
    for module in run.core.modules():
        module._compiled_call_impl = None
    run.core.ops = replace(
        run.core.ops,
        cross_entropy=torch._dynamo.eval_frame.innermost_fn(run.core.ops.cross_entropy),
    )
    for optimizer in run.optimizers:
        if isinstance(optimizer, WarmedUp):
            optimizer.give_up_compiling()
    torch._dynamo.reset()


def _try_step(run: Run, eval_shapes: Sequence[tuple[int, int]]) -> Exception | None:
    """Return what passes on made-up tokens raised, or None.

    The core is called past DDP's wrapper, so that a rank that fails leaves no other waiting for its
    gradients.
    """
    device = run.mesh.device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for rows, seq_len in run.feed.shapes:
                for _ in range(PASSES):
                    _loss(run, rows, seq_len).backward()  # type: ignore[no-untyped-call]
            run.core.eval()
            with torch.no_grad():
                for rows, seq_len in eval_shapes:
                    _loss(run, rows, seq_len)
            for optimizer in run.optimizers:
                if isinstance(optimizer, WarmedUp):
                    optimizer.warm_up()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail with any type of error; the caller tries the plain model before it goes on
        return error
    finally:
        run.core.train()
        run.zero_grad(run.trained())
    return None


def _loss(run: Run, rows: int, seq_len: int) -> Tensor:
    """The loss of made-up tokens. Inputs and targets are two tensors, as in training: the compiler
    looks at that.
    """
    tokens_BT, targets_BT = (
        torch.zeros(rows, seq_len, dtype=torch.int64, device=run.mesh.device) for _ in range(2)
    )
    doc_ids_BT = (
        torch.zeros_like(tokens_BT, dtype=torch.int32) if run.config.data.document_mask else None
    )
    with run.autocast():
        loss_sum, _ = run.core(tokens_BT, targets_BT, doc_ids_BT)
    return loss_sum  # type: ignore[no-any-return]
