"""Compile before training starts, so that the cost is reported and a failure is harmless."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from flatout.assembly.choices import Decision, speedup_named
from flatout.assembly.compiling import known_processor, mark_as_cached, undo
from flatout.assembly.run import Run
from flatout.distributed.pipeline import Pipeline
from flatout.training.metrics.log import Log
from flatout.training.signals import StopRequests, WorkInterrupted

PASSES = 2
"""Training passes per shape: CUDA graphs are recorded at the second call."""
MAX_SHAPES = 64
"""Static shapes per function. A run with length buckets has more than torch's own limit of 8."""


def warm_up(
    run: Run,
    log: Log,
    *,
    eval_shapes: Sequence[tuple[int, int]] = (),
    stop: StopRequests | None = None,
) -> None:
    """Compile now, by running training and evaluation passes in the shapes of the run.

    RNG, weights, buffers and gradients do not change. `eval_shapes` comes from
    `evaluation.batch_shapes`. If it is empty, no graph is compiled for evaluation.

    torch.compile is lazy, so its errors appear at the first call. If it fails on any rank and the
    plain code works, the run continues uncompiled and reports it.
    Raises: WorkInterrupted, on every rank, when `stop` was requested on one. A request interrupts
            the compiler, unless its passes communicate with other ranks (fully_shard): then it
            takes effect after the pass.
    """
    compiled = compiled_speedups(run)
    if not compiled:
        return
    began_s = time.perf_counter()
    task = log.progress.task("Compiling the model (once, often 20 to 60 s)")
    limit = torch._dynamo.config.patch(recompile_limit=MAX_SHAPES)
    with run.pulse.during("compiling"), task, limit, known_processor(), warnings.catch_warnings():
        # which the compiler causes itself
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        failure, any_failed = _try_step(run, eval_shapes, stop)
    if not any_failed:
        log.compiled(time.perf_counter() - began_s)
        if run.mesh.device.type == "cpu":
            mark_as_cached(run.config)
        return
    undo(run.core)
    plain_failure, _ = _try_step(run, eval_shapes)
    if plain_failure is not None:
        raise plain_failure
    first_line = str(failure).splitlines()[0] if str(failure) else ""
    reason = "compiling failed on another rank, running eager"
    if failure:
        reason = f"compiling failed, running eager: {type(failure).__name__}: {first_line}"
    run.decisions = [
        Decision(d.name, False, reason) if d.name in compiled else d for d in run.decisions
    ]
    for name in compiled:
        log.event("speedup", name=name, on=False, reason=reason)
    log.progress.say(reason[0].upper() + reason[1:])


def compiled_speedups(run: Run) -> list[str]:
    """Return the names of the run's speedups that use torch.compile."""
    return [name for name in run.speedups if speedup_named(name).compiles]


def _try_step(
    run: Run, eval_shapes: Sequence[tuple[int, int]], stop: StopRequests | None = None
) -> tuple[Exception | None, bool]:
    """Run passes on dummy tokens until one fails on any rank.

    The ranks agree after each pass, because those of fully_shard wait for each other within it.

    Returns: this rank's exception or None, and whether a rank has one.
    Raises: WorkInterrupted, on every rank, when `stop` was requested on one.
    """
    device = run.mesh.device
    run.guard.begin()
    try:
        for work in _passes(run, eval_shapes):
            failure = _attempt(work, stop if run.mesh.device_mesh is None else None)
            stops = stop is not None and stop.signal_number is not None
            num_failed, num_stopped = run.mesh.sum(
                *(torch.tensor(float(x), device=device) for x in (failure is not None, stops))
            )
            if float(num_stopped):  # the signal may also have ended the compiler's processes
                raise WorkInterrupted
            if float(num_failed):
                return failure, True
    finally:
        run.guard.undo()
        run.core.train()
        run.parts.zero_grad(run.trained())
    return None, False


def _passes(run: Run, eval_shapes: Sequence[tuple[int, int]]) -> Iterator[Callable[[], object]]:
    """Yield the passes. Every rank has the same number of them.

    They call the core without DDP's wrapper, so that a failing rank does not leave the others
    waiting for its gradients.
    """

    def train(rows: int, seq_len: int) -> None:
        for result in _results(run, rows, seq_len):
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]

    def evaluate(rows: int, seq_len: int) -> None:
        run.core.eval()
        with torch.no_grad():
            list(_results(run, rows, seq_len))

    for shape in run.loader.shapes:
        yield from [partial(train, *shape)] * PASSES
    for each in eval_shapes:
        yield partial(evaluate, *each)


def _attempt(work: Callable[[], object], stop: StopRequests | None) -> Exception | None:
    """Do `work` until `stop` is requested, and return the exception with which it failed."""
    try:
        with stop.interruptible() if stop else nullcontext():
            work()
    except WorkInterrupted:
        return None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise any type. The caller then tries the plain model
        return error
    return None


def _results(run: Run, rows: int, seq_len: int) -> Iterator[Tensor]:
    """Yield the loss on dummy tokens, or the results of the stages of this rank.

    Inputs and targets are distinct tensors, as in training: the compiler guards on identity.
    """
    tokens_BT, targets_BT = (
        torch.zeros(rows, seq_len, dtype=torch.int64, device=run.mesh.device) for _ in range(2)
    )
    doc_ids_BT = None
    if run.config.data.document_mask:
        doc_ids_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)
    if isinstance(run.model, Pipeline):
        yield from run.model.results(tokens_BT, targets_BT, doc_ids_BT)
        return
    with run.autocast():
        loss_sum, _ = run.core(tokens_BT, targets_BT, doc_ids_BT)
    yield loss_sum
