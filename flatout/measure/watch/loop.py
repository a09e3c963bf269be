"""What a watched loop calls: the start and end of steps, waits and phases. None of it raises."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.distributed.rendezvous import stated_ranks
from flatout.errors import ConfigError
from flatout.hardware.machine import GIB, probe
from flatout.measure.scripts.request import Recording
from flatout.measure.steps.evidence import Evidence, Failure
from flatout.measure.steps.gathering import gathered
from flatout.measure.steps.guard import guarded
from flatout.measure.steps.lines import site_of
from flatout.measure.steps.machine import host_facts
from flatout.measure.steps.windows import Windows, fewest
from flatout.measure.watch.hooks import OWN_WORK, Hooks
from flatout.training.metrics.device import process_peak_bytes
from flatout.training.metrics.phases import PhaseTimer
from flatout.training.metrics.readback import DelayedReadback

FEW_STEPS = 5
"""With fewer ordinary steps, averages mean nothing, unless the steps are long."""
MOST_KEPT = 20_000
"""Losses that are kept: the last ones."""


@dataclass(frozen=True)
class Settings:
    """What a watch was told about its loop."""

    model: torch.nn.Module | None = None
    planned_steps: int | None = None
    tokens_per_step: int | None = None
    recorded_steps: int = 2
    is_script: bool = False
    """Whether the loop states nothing itself."""
    is_enough: Callable[[Windows], bool] = lambda windows: False
    """Whether what was measured is enough."""
    recording: Recording | None = None


class LoopTimer:
    """Times a loop by the calls that it makes here.

    An error of ours is logged, and ends the measurement. The loop continues. Calls from other
    threads than the one that takes the steps are ignored.
    """

    def __init__(self, settings: Settings, *, at_exit: Callable[[], None]) -> None:
        self.rank, self.world_size = ranks()
        self.steps = 0
        """Steps that have ended."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=MOST_KEPT)
        """(step, loss), as logged."""
        self.grad_norms: deque[tuple[int, float]] = deque(maxlen=MOST_KEPT)
        """(step, norm of the gradient), as logged."""
        self._logged = DelayedReadback()
        self.windows: Windows | None = None
        """None until the loop's first call, which makes the instruments."""
        self.base: str | None = "other" if settings.is_script else "compute"
        """The phase of a step's time that belongs to no other, if it is timed."""
        self._settings, self._at_exit = settings, at_exit
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
            source="script" if settings.is_script else "watched loop",
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

    def _started(self) -> Windows | None:
        """Return the windows, which the first call makes. None in other threads than the loop's."""
        if self._is_off:
            return None
        if self.windows is None:
            self._is_off = True  # unless all of this works
            self._timer, settings = PhaseTimer(), self._settings
            self._hooks = Hooks(self._timer, self.base or "compute")
            self._installed.enter_context(self._hooks.installed())
            atexit.register(self._at_exit)
            self._installed.callback(atexit.unregister, self._at_exit)
            self.windows = Windows(
                self._timer,
                device_of(settings.model),
                on_step=self._count,
                recorded_steps=settings.recorded_steps,
                is_enough=settings.is_enough,
                is_script=settings.is_script,
                recording=settings.recording,
            )
            self._is_off = False
        return self.windows if self._timer.thread == threading.get_ident() else None

    def _count(self) -> None:
        self.steps += 1
        self._read_logged()

    @guarded
    def time_loaders(self) -> None:
        """Time all DataLoaders of torch, for a loop that hides its own and states its steps."""
        if self._started():
            self._installed.enter_context(self._hooks.loaders_installed())
            self._steps_are_stated = True

    @guarded
    def begin_step(self) -> bool:
        """Start a step. Steps inside a step are part of it. False: the measurement is over."""
        windows, goes_on = self._started(), True
        if windows is None:
            return True
        if self._depth == 0:
            if not self._steps_are_stated:  # the first wait has started one
                windows.drop_step()
            self._steps_are_stated = True
            self._timer.leave_if_open(str(self.base))
            goes_on = windows.start_step()
        self._depth += 1
        if self.base is not None:
            self._timer.enter(self.base)
        return goes_on

    @guarded
    def end_step(self, error: BaseException | None = None) -> None:
        """End the work of a step. The step lasts until the next one starts."""
        if not self._started() or not self._depth:
            return
        self._depth -= 1
        self._timer.leave_if_open(str(self.base))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            first = (str(error).splitlines() or [""])[0]
            self._failure = Failure(
                kind="out-of-memory",
                message=f"Out of memory at step {self.steps}: {first}".rstrip(": "),
                step=self.steps,
                site=site_of(error),
            )

    @guarded
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

    @guarded
    def end_wait(self) -> None:
        """End waiting for a batch."""
        self._timer.leave_if_open("data_wait")
        if not self._steps_are_stated:
            self._timer.enter("compute")

    @guarded
    def end_epoch(self) -> None:
        """End the last step of an epoch: what follows is not a step."""
        windows = self._started()
        if windows and self._depth == 0 and self._timer.current in OWN_WORK:
            self._timer.leave_if_open("compute")
            if self._steps_are_stated:
                windows.end_step()
            else:  # it began with the wait that found no batch
                windows.drop_step()

    @guarded
    def enter(self, phase: str) -> None:
        """Start a phase."""
        if self._started():
            self._timer.enter(phase)

    @guarded
    def leave(self, phase: str | None) -> None:
        """End a phase and those inside it, if it is running. None: the current one."""
        if self._started() and phase is None:
            self._timer.leave()
        elif self._started():
            self._timer.leave_if_open(str(phase))

    @guarded
    def log(self, figures: Mapping[str, Any], *, step: int) -> None:
        """Keep the loss and the gradient's norm of a step. Tensors are read one step later.

        Shapes: each tensor has one element.
        """
        if self._is_off:
            return
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

    @guarded
    def _stop(self) -> None:
        try:
            if self.windows is not None:
                self.windows.close()
        finally:
            self._installed.close()


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
