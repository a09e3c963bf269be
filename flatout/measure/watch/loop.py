"""What a watched loop calls: the start and end of steps, waits and phases. None of it raises."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from flatout.distributed.rendezvous import stated_ranks
from flatout.errors import ConfigError, FlatoutError
from flatout.hardware.machine import GIB, probe
from flatout.measure.steps.evidence import Evidence, Failure
from flatout.measure.steps.gathering import gathered
from flatout.measure.steps.lines import site_of
from flatout.measure.steps.machine import gpu_facts, host_facts
from flatout.measure.steps.windows import MIN_WARM_STEPS, Windows
from flatout.measure.watch.hooks import OWN_WORK, Hooks
from flatout.training.metrics.device import process_peak_bytes
from flatout.training.metrics.phases import PhaseTimer
from flatout.training.metrics.readback import DelayedReadback

MAX_WARM_STEPS = 20
WARM_S = 0.5
"""Warm-up lasts at least this long after the first step, unless it has ten steps before."""
MIN_ORDINARY_STEPS, ORDINARY_S = 5, 0.3
"""Ordinary steps before the special ones."""
CALLED_STEPS = 8
"""Steps whose calls are marked."""
SAMPLED_EVERY_S = 0.01
"""Time between two looks at the loop's line."""
FEW_STEPS = 5
"""With fewer ordinary steps, averages mean nothing, unless the steps are long."""
MOST_KEPT = 20_000
"""Losses that are kept: the last ones."""
LONG_S = 2.0
"""Seconds from which a step is long: a few of them tell as much as many short ones."""
LOG = logging.getLogger("flatout.watch")
Method = TypeVar("Method", bound=Callable[..., Any])


def safe(method: Method) -> Method:
    """Wrap a method of LoopTimer so that an error in it is logged and ends the measurement.

    Afterwards, and on other ranks than 0, it does nothing and returns None.
    """

    @functools.wraps(method)
    def call(self: LoopTimer, /, *values: Any, **named: Any) -> Any:
        if self._is_off:
            return None
        try:
            return method(self, *values, **named)
        except Exception as error:
            self._is_off = True
            with suppress(Exception):
                if self._settings.source != "script":
                    self._remove()
                elif self.windows is not None:  # torch may be calling the hooks one by one now
                    self.windows.close()
            told = error.what if isinstance(error, FlatoutError) else repr(error)
            LOG.warning("flatout.watch has stopped, and the loop continues: %s", told)
            return None

    return cast(Method, call)


@dataclass(frozen=True)
class Settings:
    """What a watch was told about its loop."""

    model: torch.nn.Module | None = None
    planned_steps: int | None = None
    tokens_per_step: int | None = None
    recorded_steps: int = 2
    base: str = "compute"
    """Phase of a step's time that belongs to no other."""
    source: Literal["watched loop", "script"] = "watched loop"


class LoopWindows(Windows):
    """The windows of a watched loop. They last as long as it does.

    All steps after the warm-up are ordinary, except for a few near the start of the loop, which are
    slower and do not count for the averages.
    """

    sampled_every_s = SAMPLED_EVERY_S

    def __init__(
        self,
        timer: PhaseTimer,
        device: str,
        on_step: Callable[[float], None],
        recorded_steps: int,
    ) -> None:
        super().__init__(timer, device, on_step)
        self.gpu: dict[str, Any] = {}
        """What the driver reported of the GPU between two steps."""
        self.called_steps = CALLED_STEPS
        """Steps whose calls are marked."""
        self._recorded_steps = recorded_steps

    def _windows(self) -> Generator[None, None, None]:
        yield from self._until_compiled()
        with self._sampling(self.sampled_every_s):
            yield from self._ordinary(
                lambda steps, seconds: (
                    steps < fewest(MIN_ORDINARY_STEPS, steps, seconds)
                    or (seconds < ORDINARY_S and steps < MAX_WARM_STEPS)
                )
            )
        if self.compilations:
            self.notes.append("Steps compile code: their calls and operations were not recorded.")
        else:
            self.gpu = gpu_facts(probe(), self.device)  # while it works
            self.called_steps = 1 if self._is_late() else CALLED_STEPS
            yield from self._special()
        with self._sampling(self.sampled_every_s):
            yield from self._ordinary(lambda steps, seconds: True)

    def _special(self) -> Iterator[None]:
        """Take the steps that are slower, and do not count for the averages."""
        yield from self._marked_calls(self.called_steps)
        if self._recorded_steps:
            yield from self._recorded(self._recorded_steps)

    def _is_late(self) -> bool:
        return self.step_s > LONG_S

    def _until_compiled(self) -> Iterator[None]:
        """Warm up until nothing is compiled any more."""
        yield
        first_s, least = time.perf_counter(), MIN_WARM_STEPS
        while self.warm.steps < MAX_WARM_STEPS:
            last_s = time.perf_counter()
            compiles = self._compiled.changed()
            self.has_compiled |= compiles
            self._compiled.poll()
            long_enough = time.perf_counter() - first_s >= WARM_S or self.warm.steps >= 10
            if self.warm.steps >= least and long_enough and not compiles:
                return
            yield
            least = fewest(MIN_WARM_STEPS, 1, time.perf_counter() - last_s)


class LoopTimer:
    """Times a loop by the calls that it makes here.

    An error of ours is logged, and ends the measurement. The loop continues. Calls from other
    threads than the one that takes the steps are ignored.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        at_exit: Callable[[], None],
        windows: type[LoopWindows] = LoopWindows,
    ) -> None:
        self.rank, self.world_size = ranks()
        self.steps = 0
        """Steps that have ended."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=MOST_KEPT)
        """(step, loss), as logged."""
        self.grad_norms: deque[tuple[int, float]] = deque(maxlen=MOST_KEPT)
        """(step, norm of the gradient), as logged."""
        self._logged = DelayedReadback()
        self.windows: LoopWindows | None = None
        """None until the loop's first call, which makes the instruments."""
        self._settings, self._at_exit, self._windows = settings, at_exit, windows
        self._is_off = self.rank != 0
        self._installed = ExitStack()
        self._steps_are_stated, self._depth = False, 0
        self._failure: Failure | None = None

    def evidence(self) -> Evidence:
        """Return what has been measured so far.

        Raises: ConfigError when no step has been watched.
        """
        settings, windows, machine = self._settings, self.windows, probe()
        self._read_logged(flush=True)
        if windows is None:
            where = f": this is rank {self.rank}, and rank 0 is watched" if self.rank else ""
            raise ConfigError(
                f"No step has been watched{where}.",
                fix="Wrap the batches, `for batch in watch(loader)`, or use `with watch.step()`.",
            )
        planned, tokens, device = settings.planned_steps, settings.tokens_per_step, windows.device
        memory = {"total_gib": machine.memory_gib, "peak_gib": process_peak_bytes() / GIB}
        if windows.on_gpu:
            memory = {
                "total_gib": torch.cuda.mem_get_info(device)[1] / GIB,
                "peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            }
        model = settings.model
        known = Evidence(
            source=settings.source,
            machine=machine,
            device=device,
            world_size=self.world_size,
            **host_facts(Path()),
            **windows.gpu,
            **memory,
            parameters=None if model is None else sum(w.numel() for w in model.parameters()),
            tokens_per_step=tokens,
            planned_steps=planned,
            losses=tuple(self.losses) or None,
            grad_norms=tuple(self.grad_norms) or None,
            failure=self._failure,
        )
        ordinary = windows.ordinary
        if ordinary.steps < fewest(FEW_STEPS, ordinary.steps, ordinary.seconds):
            short = f"{self.steps} steps are too few to measure: the warm-up takes up to 20."
            return known.model_copy(update={"notes": (*windows.notes, short)})
        found = gathered(known, windows, windows.periodic_s())
        saves = self._hooks.saves.sites(windows.sampled_steps, counted=False)
        return found.model_copy(
            update={
                "sites": {**found.sites, **saves},
                "tokens_per_s": tokens and tokens / windows.step_s,
                "remaining_s": planned and max(planned - self.steps, 0) * (found.step_s or 0.0),
            }
        )

    def close(self) -> bool:
        """Remove all hooks and measure no longer, and return whether a step has been watched."""
        was_on = self.windows is not None and not self._is_off
        self._stop()
        self._is_off = True
        return was_on

    @property
    def is_timed_thread(self) -> bool:
        """Whether the calling thread is the one that takes the steps, and is measured."""
        return not self._is_off and self._timer.thread == threading.get_ident()

    def is_in(self, phase: str) -> bool:
        """Return whether a phase is the current one."""
        return self.windows is not None and self._timer.current == phase

    @property
    def workers(self) -> int | None:
        """Processes of the torch DataLoader. None means none was seen."""
        return self._hooks.workers if self.windows is not None else None

    @property
    def dataset(self) -> str | None:
        """What the last DataLoader reads, as in `Evidence`."""
        return self._hooks.dataset if self.windows is not None else None

    def _started(self) -> LoopWindows | None:
        """Return the windows, which the first call makes. None in other threads than the loop's."""
        if self.windows is None:
            self._timer = PhaseTimer()
            self._hooks = Hooks(self._timer, self._settings.base)
            self._installed.enter_context(self._hooks.installed())
            atexit.register(self._at_exit)
            self._installed.callback(atexit.unregister, self._at_exit)
            self.windows = self._windows(
                self._timer,
                device_of(self._settings.model),
                self._count,
                self._settings.recorded_steps,
            )
        return self.windows if self._timer.thread == threading.get_ident() else None

    def _count(self, seconds: float) -> None:
        self.steps += 1
        self._read_logged()

    @safe
    def time_loaders(self) -> None:
        """Time all DataLoaders of torch, for a loop that hides its own and states its steps."""
        if self._started():
            self._installed.enter_context(self._hooks.loaders_installed())
            self._steps_are_stated = True

    @safe
    def begin_step(self) -> None:
        """Start a step. Steps inside a step are part of it."""
        windows = self._started()
        if windows is None:
            return
        if self._depth == 0:
            if not self._steps_are_stated:  # the first wait has started one
                windows.drop_step()
            self._steps_are_stated = True
            self._timer.leave_if_open(self._settings.base)
            windows.start_step()
        self._depth += 1
        self._timer.enter(self._settings.base)

    @safe
    def end_step(self, error: BaseException | None = None) -> None:
        """End the work of a step. The step lasts until the next one starts."""
        if not self._started() or not self._depth:
            return
        self._depth -= 1
        self._timer.leave_if_open(self._settings.base)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            first = (str(error).splitlines() or [""])[0]
            self._failure = Failure(
                kind="out-of-memory",
                message=f"Out of memory at step {self.steps}: {first}".rstrip(": "),
                step=self.steps,
                site=site_of(error),
            )

    @safe
    def begin_wait(self, *, starts_step: bool = True) -> bool:
        """Start waiting for a batch, or for a loader that opens, and return whether it is timed."""
        windows = self._started()
        if windows is None or not self._hooks.starts("data_wait"):
            return False
        if starts_step and not self._steps_are_stated:
            self._timer.leave_if_open("compute")
            windows.start_step()
        self._timer.enter("data_wait")
        return True

    @safe
    def end_wait(self) -> None:
        """End waiting for a batch."""
        self._timer.leave_if_open("data_wait")
        if not self._steps_are_stated:
            self._timer.enter("compute")

    @safe
    def end_epoch(self) -> None:
        """End the last step of an epoch: what follows is not a step."""
        windows = self._started()
        if windows and self._depth == 0 and self._timer.current in OWN_WORK:
            self._timer.leave_if_open("compute")
            if self._steps_are_stated:
                windows.end_step()
            else:  # it began with the wait that found no batch
                windows.drop_step()

    @safe
    def enter(self, phase: str) -> None:
        """Start a phase."""
        if self._started():
            self._timer.enter(phase)

    @safe
    def leave(self, phase: str) -> None:
        """End a phase and those inside it, if it is running."""
        if self._started():
            self._timer.leave_if_open(phase)

    @safe
    def log(self, figures: Mapping[str, Any], *, step: int) -> None:
        """Keep the loss and the gradient's norm of a step. Tensors are read one step later.

        Shapes: each tensor has one element.
        """
        known = {name: value for name, value in figures.items() if name in ("loss", "grad_norm")}
        tensors = {name: torch.as_tensor(value).detach() for name, value in known.items()}
        if tensors:
            shaped = {name: value.reshape(()) for name, value in tensors.items()}
            self._logged.push(step, shaped, due=True)

    def _read_logged(self, *, flush: bool = False) -> None:
        """Keep the metrics that have arrived."""
        for step, figures in self._logged.ready(flush=flush):
            for name, kept in (("loss", self.losses), ("grad_norm", self.grad_norms)):
                if name in figures:
                    kept.append((step, figures[name]))

    @safe
    def _stop(self) -> None:
        self._remove()

    def _remove(self) -> None:
        try:
            if self.windows is not None:
                self.windows.close()
        finally:
            self._installed.close()


def fewest(usual: int, steps: int, seconds: float) -> int:
    """Return how many steps are enough: two if those so far were long."""
    return 2 if seconds > LONG_S * max(steps, 1) else usual


def ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, by torch or the environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        stated = stated_ranks()
    except ConfigError:  # another launcher's variables
        return 0, 1
    return stated.rank, stated.world_size


def device_of(model: torch.nn.Module | None) -> str:
    """Return the device on which a loop computes."""
    if model is not None:
        for weights in model.parameters():
            if weights.device.type == "cuda":
                return str(weights.device)
            return weights.device.type
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return "cuda" if used else "cpu"
