"""Times the steps of a script inside its process, and records what the script is made of."""

from __future__ import annotations

import atexit
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.distributed.rendezvous import stated_ranks
from flatout.errors import ConfigError
from flatout.hardware.machine import GIB
from flatout.measure.attach.guard import guarded, replace
from flatout.measure.attach.hooks import observing
from flatout.measure.attach.lines import failure_of
from flatout.measure.attach.request import Answer, Request
from flatout.measure.attach.screening import Clock
from flatout.storage.files import write_text
from flatout.training.metrics.compile_events import CompilationWatch
from flatout.training.metrics.device import process_peak_bytes

OTHERS_STEPS = 25
"""Steps of other optimizers after which the main one is taken to have ended its work."""
FEW_STEPS = 3
"""Measured steps that are enough once a trial is late."""
WAIT_S = 60.0
"""How long a process waits to be ended."""

MIN_WARM_STEPS = 3
"""Fewest steps of a warm-up by time. Its last one compiles nothing."""


class Steps:
    """Calls `ended` after each step of the script of this process: of the optimizer that ends them.

    That is the first one, until others have taken many steps without it.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self.optimizer: Any = None
        self.has_others = False
        self._steps_of_others, self._ended = 0, ended
        self.remove = register_optimizer_step_post_hook(guarded(self._after_step)).remove

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        weights = first_weights(optimizer)
        # one of a traced model updates nothing
        if torch.compiler.is_compiling() or weights is None or isinstance(weights, FakeTensor):
            return
        if self.optimizer is not None and weights is not first_weights(self.optimizer):
            self._steps_of_others, self.has_others = self._steps_of_others + 1, True
            if self._steps_of_others < OTHERS_STEPS:
                return
        self.optimizer, self._steps_of_others = optimizer, 0
        self._ended()


def _shifted(offset: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sets a seed, `plain`, for other seeds. Lists and None stay."""

    def seed(*args: Any, **kwargs: Any) -> Any:
        first = [one + offset if isinstance(one, (int, np.integer)) else one for one in args[:1]]
        return plain(*first, *args[1:], **kwargs)

    return seed


class StepTimer:
    """Times the steps of the script of this process, from one step of its optimizer to the next.

    During the warm-up it waits for the device after each step. The measured steps are queued as
    they would be without it.
    """

    def __init__(self, request: Request, failed: dict[str, str]) -> None:
        assert request.timing is not None
        self._request, self._timing, self._failed = request, request.timing, failed
        self._marks: list[Any] = []
        """The end of each step: a time on the CPU, or an event on a GPU."""
        self._warmup: int | None = None
        """Steps of the warm-up, the first step not counted. None while it lasts."""
        self._is_complete = False
        self._first_s = self._began_s = 0.0
        self._clock = Clock.now()
        """At the start of the measured steps."""
        self._compiled: list[int] = []
        self._compile_s = 0.0
        self._losses: list[list[Tensor]] = [[]]
        self._process = os.getpid()
        self._watch = CompilationWatch()
        self._seed()
        self._steps = Steps(self._end_step)
        for name in ("backward", "grad"):  # the first one is also what Tensor.backward calls
            replace(torch.autograd, name, partial(observing, self._before_backward))
        atexit.register(guarded(self.answer))

    def _seed(self) -> None:
        """Fix all seeds, those that the script does not set included."""
        offset = self._timing.seed_offset
        for owner, name in ((torch, "manual_seed"), (random, "seed"), (np.random, "seed")):
            getattr(owner, name)(offset)
            if offset:
                replace(owner, name, partial(_shifted, offset))

    def _before_backward(self, *args: Any, **kwargs: Any) -> None:
        loss = loss_in(roots_of(args, kwargs))
        if loss is not None and not isinstance(loss, FakeTensor):
            self._losses[-1].append(loss.detach())

    def _end_step(self) -> None:
        if self._watch.changed():
            self._compile_s += self._watch.poll().compile_s
            self._compiled.append(len(self._marks) - 1)
        mark, now_s = time.perf_counter(), time.perf_counter()
        if self._on_gpu():
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,assignment]
            mark.record()  # type: ignore[attr-defined]
            if self._warmup is None:
                torch.cuda.synchronize()
        self._marks.append(mark)
        self._losses.append([])
        if len(self._marks) == 1:
            self._first_s = now_s
        if self._warmup is None:
            self._end_warmup(now_s)
        self._is_complete = self._is_enough(now_s)
        if self._is_complete:
            self.answer()
            end_script(is_one_of_several=ranks()[1] > 1)

    def _end_warmup(self, now_s: float) -> None:
        """End the warm-up if it was long enough, and its last step compiled nothing."""
        timing, steps, past_s = self._timing, len(self._marks) - 1, now_s - self._first_s
        if timing.warmup_steps is not None:
            is_over = steps >= timing.warmup_steps
        else:
            is_ready = steps >= MIN_WARM_STEPS and steps - 1 not in self._compiled
            is_over = past_s >= timing.warmup_s and (is_ready or past_s >= timing.limit_s / 2)
        if is_over:
            self._warmup, self._began_s, self._clock = steps, now_s, Clock.now()

    def _is_enough(self, now_s: float) -> bool:
        if self._warmup is None:
            return False
        timing, steps = self._timing, len(self._marks) - 1 - self._warmup
        late_s = now_s - self._first_s - timing.limit_s
        return (
            (steps >= timing.steps and now_s - self._began_s >= timing.seconds)
            and len(self._marks) >= timing.first_steps
        ) or (late_s >= 0 and steps >= (1 if late_s >= timing.limit_s else FEW_STEPS))

    def _step_s(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._on_gpu():
            return [1e-3 * one.elapsed_time(other) for one, other in pairs]
        return [other - one for one, other in pairs]

    def _on_gpu(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def answer(self) -> None:
        """Write what was measured, once."""
        if not self._marks or os.getpid() != self._process or ranks()[0]:
            return
        peak = process_peak_bytes()
        if self._on_gpu():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        step_s, (wall_s, own_s) = self._step_s(), self._clock.until(Clock.now())
        reply(
            self._request.answer,
            len(self._marks),
            step_s=step_s,
            warmup_steps=len(step_s) if self._warmup is None else self._warmup,
            is_complete=self._is_complete,
            own_share=1.0 if self._on_gpu() else own_s / wall_s,
            compiled=[index for index in self._compiled if index >= 0],
            compile_s=self._compile_s or None,
            losses=[
                statistics.fmean(float(loss) for loss in losses)
                for losses in self._losses
                if losses
            ],
            peak_gib=peak / GIB,
            failed=self._failed,
        )
        self._marks = []


@cache
def ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, by torch or the environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        stated = stated_ranks()
    except ConfigError:  # another launcher's variables
        return 0, 1
    return stated.rank, stated.world_size


def reply(place: str, steps: int, **found: Any) -> None:
    """Write an answer to a file, with the error that ends the script, if there is one."""
    error = getattr(sys, "last_value", None)
    rank, size = ranks()
    failure = failure_of(error, steps) if isinstance(error, Exception) else None
    if failure and size > 1:
        failure = failure.model_copy(update={"message": f"Rank {rank}: {failure.message}"})
    answer = Answer(rank=rank, steps=steps, failure=failure, **found)
    with suppress(OSError):  # the command has ended, and has removed its directory
        write_text(Path(place), answer.model_dump_json())


def tracer_of() -> str:
    """Return what follows all calls of this thread, besides flatout: a profiler, a debugger. ""."""
    hook = sys.gettrace() or sys.getprofile()
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return "torch.profiler"
    return "" if hook is None else getattr(hook, "__module__", None) or type(hook).__name__


def first_weights(optimizer: Any) -> Any:
    """Return the first tensor that an optimizer updates. Its first groups may be empty."""
    return next((each for group in optimizer.param_groups for each in group["params"]), None)


def roots_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors from which a call of torch.autograd.backward or grad starts."""
    given = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    every = given if isinstance(given, (list, tuple)) else [given]
    return [one for one in every if isinstance(one, Tensor)]


def loss_in(roots: list[Tensor]) -> Tensor | None:
    """Return what is a loss by its shape: one number from which alone a backward pass starts."""
    return roots[0] if len(roots) == 1 and roots[0].numel() == 1 else None


def end_script(*, is_one_of_several: bool) -> None:
    """End the script of this process after its answer.

    Others would fail without it, and a parent process would continue: those end all of them.
    """
    if is_one_of_several or parent_process() is not None:
        time.sleep(WAIT_S)
    with suppress(Exception):
        sys.stdout.flush()
    raise SystemExit(0)
