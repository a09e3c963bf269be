"""Times what a loop calls in torch and other packages: optimizers, saves, data loaders.

Every hook times the call that it replaces and passes everything through. Calls from other threads
are not timed.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.measure.attach.guard import guarded, replaced
from flatout.measure.attach.inputs import Batches
from flatout.measure.attach.lines import LineTotals, user_frame
from flatout.training.metrics.phases import PhaseTimer

Result = TypeVar("Result")

SAVES = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("safetensors.torch", "serialize_file"),
    ("lightning.fabric.plugins.io.torch_io", "_atomic_save"),
    ("lightning_fabric.plugins.io.torch_io", "_atomic_save"),
    ("transformers.trainer", "Trainer._save_checkpoint"),
    ("accelerate.accelerator", "Accelerator.save_state"),
)
"""Functions that write checkpoints, by the module that calls them. Only of imported modules."""
COLLECTIVES = (
    *("all_reduce", "barrier", "broadcast", "reduce", "gather", "scatter", "all_gather"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
)
"""Functions of torch.distributed in which a rank waits for others."""
BASE = "other"
"""The phase of a step's time that belongs to no other."""
SAFELY = guarded(lambda call: call())
OWN_WORK = frozenset({None, "compute", BASE})
"""Phases that a wait for data interrupts. In others, such as evaluation, it is part of them."""


def observing(before: Callable[..., Any], plain: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that calls `before` first, and what that returned, if anything, at the end.

    Both are guarded.
    """
    before = guarded(before)

    def call(*args: Any, **kwargs: Any) -> Result:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        after = before(*args, **kwargs)
        try:
            return plain(*args, **kwargs)
        finally:
            if after is not None:
                SAFELY(after)

    return call


def rows_of(dataset: Any) -> str | None:
    """Return what worker processes would do with a dataset, as in `Evidence.dataset`."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, IterableDataset):
        return "iterable"
    return "memory" if isinstance(dataset, TensorDataset) else None


def moment() -> tuple[float, float]:
    """Return the seconds of a clock that stops while this thread waits for a core, if the system
    tells, and those for which it has run.
    """
    queued_s = 0.0
    with suppress(OSError, IndexError, ValueError), open("/proc/thread-self/schedstat") as file:
        queued_s = 1e-9 * int(file.read().split()[1])
    return time.perf_counter() - queued_s, time.thread_time()


class Hooks:
    """Enters and leaves the phases of a timer when the loop calls what they are about.

    `base` is the phase of a step's time that belongs to no other.
    """

    def __init__(self, timer: PhaseTimer) -> None:
        self.saves = LineTotals()
        """The lines of user code that save."""
        self.workers: int | None = None
        """Processes of the last DataLoader that the loop waited for. None means there was none."""
        self.dataset: str | None = None
        """What it reads, as in `Evidence`."""
        self.pids: list[int] = []
        """The processes."""
        self.pinned = True
        """Whether its batches are pinned."""
        self.batch_size: int | None = None
        """The number of its rows in a batch, if they are drawn: others may follow in time."""
        self.read: tuple[Callable[[], Any], Any] = (lambda: None, None)
        """A reference to the dataset, and the function that makes batches of its items."""
        self.waited_s = self.ran_s = 0.0
        """Seconds of waits for data, less those for a core, and those for which the thread ran."""
        self._starts, self._started_s, self._is_starting = 0, 0.0, False
        """Later iterators with new workers, and the waits for them and for their first batch."""
        self.batches = Batches()
        self._timer = timer

    def _note_wait(self, source: Any, before: tuple[float, float]) -> None:
        """Note a wait for a batch, or for the iterator of a DataLoader, which starts workers."""
        seconds, ran_s = (b - a for a, b in zip(before, moment(), strict=True))
        self.waited_s += seconds
        self.ran_s += ran_s
        starts = bool(self.workers and getattr(source, "num_workers", 0))
        starts = starts and not source.persistent_workers
        self._starts += starts
        self._started_s += seconds * (starts or self._is_starting)
        self._is_starting = starts

    def found(self) -> dict[str, Any]:
        """Return what was seen of the data, by the names in `Evidence`."""
        return {
            "workers": self.workers,
            "dataset": self.dataset,
            "pinned": self.pinned,
            "reads_ran": self.ran_s / self.waited_s if self.waited_s else None,
            "started_anew": self._started_s / self.waited_s if self._starts else None,
            "same_rows": self.batches.rows,
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time optimizers, saves and the batches of every DataLoader of torch inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self._timer.collecting_gc())
            stack.callback(register_optimizer_step_pre_hook(guarded(self._before_optimizer)).remove)
            stack.callback(register_optimizer_step_post_hook(guarded(self._after_optimizer)).remove)
            for name in COLLECTIVES if torch.distributed.is_available() else ():
                waits = partial(self.timed, "communication")
                stack.enter_context(replaced(torch.distributed, name, waits))
            for loader, name in ((_BaseDataLoaderIter, "__next__"), (DataLoader, "__iter__")):
                stack.enter_context(replaced(loader, name, partial(self.timed, "data_wait")))
            for module, name in SAVES:
                kind, _, function = name.rpartition(".")
                owner: Any = sys.modules.get(module)
                owner = getattr(owner, kind, None) if kind else owner
                if owner is not None:
                    stack.enter_context(
                        replaced(owner, function, partial(self.timed, "checkpoint"))
                    )
            yield

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._timer.thread and not torch.compiler.is_compiling()

    def _before_optimizer(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Start the phase. A closure, which computes gradients, is not part of it."""
        if not self._is_ours():
            return None
        self._timer.enter("optimizer")
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": self.timed(BASE, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self.timed(BASE, args[1]), *args[2:]), kwargs
        return None

    def _after_optimizer(self, *_: object) -> None:
        if self._is_ours() and self._timer.current == "optimizer":
            self._timer.leave()

    def _note_loader(self, batches: Any) -> None:
        if hasattr(batches, "_num_workers"):
            self.workers, self.dataset = batches._num_workers, rows_of(batches._dataset)
            self.pinned = batches._pin_memory
            sampler = batches._index_sampler
            is_drawn = isinstance(getattr(sampler, "sampler", None), RandomSampler)
            self.batch_size = sampler.batch_size if is_drawn else None
            self.pids = [worker.pid for worker in getattr(batches, "_workers", ())]
            with suppress(TypeError):  # a list cannot be referred to, and is in memory anyway
                self.read = weakref.ref(batches._dataset), batches._collate_fn

    def timed(self, phase: str, plain: Callable[..., Result]) -> Callable[..., Result]:
        """Return a function whose calls are timed as a phase, and saves by their lines."""

        def call(*args: Any, **kwargs: Any) -> Result:
            now, is_wait = self._timer.current, phase == "data_wait"
            is_part = now not in OWN_WORK if is_wait else now == phase
            if is_wait and (now == phase or not is_part):
                guarded(self._note_loader)(args[0])
            if is_part or not self._is_ours():
                return plain(*args, **kwargs)
            before_s = self._timer.seconds[phase]
            before = moment() if is_wait else (0.0, 0.0)
            try:
                with self._timer.phase(phase):
                    returned = plain(*args, **kwargs)
                if is_wait:
                    guarded(self._note_wait)(args[0], before)
                    guarded(self.batches.look)(returned)
                return returned
            finally:
                line = user_frame(sys._getframe(1)) if phase == "checkpoint" else None
                if line is not None:
                    self.saves.add("save", line, self._timer.seconds[phase] - before_s)

        return call
