"""Reads the events of torch.profiler: operations by class, tiny ones, reads by the host, copies.

    with profiling(device) as profiler:
        ...  # some steps
    trace = read(profiler, steps=2, wall_s=seconds)

`Trace` has one `Op` per operation of the host and per kernel of the device, in order of time;
everything else here is a function of it. Lines of user code come from `calls.py`: the
profiler's stacks lack them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from flatout.measure.steps.evidence import KernelShare
from flatout.measure.steps.kernels import KINDS, TELLING, is_generated, kind_of

TINY_S = 20e-6
"""An operation that takes less costs about as much to start as to run."""
LAUNCH_S = 5e-6
"""Host time that starting one operation takes at least, added to the time of tiny ones."""
READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})
"""Operations with which the host reads a value, and waits for the device."""
WAITS = re.compile(r"^(cuda|hip)(Device|Stream|Event)Synchronize$")
"""Calls of the driver in which the host waits."""
EMPTY_CACHE = re.compile(r"^(cuda|hip)Free$")
"""The driver's call with which `empty_cache` returns memory."""
DRIVER_ALLOCATION = re.compile(r"^(cuda|hip)Malloc(Async)?$")
PAGEABLE = re.compile(r"Memcpy \w+ \(.*Pageable.*\)")
COPY = re.compile(r"^Mem(cpy|set) ")


@dataclass(frozen=True)
class Op:
    """An operation of the host, or a kernel or copy of the device."""

    name: str
    """Its name: `aten::mm`, or the kernel's."""
    start_s: float
    """Start, from the beginning of the trace."""
    seconds: float
    """Duration, with the operations that it calls."""
    self_s: float
    """Duration without them."""
    on_device: bool
    """Whether it ran on a GPU."""
    thread: int
    """Thread of the host, or stream of the device."""
    parent: str | None
    """The operation that called it."""
    within: str | None
    """The innermost `record_function` range around it."""
    flops: int | None
    """Floating-point operations, where there is a formula."""
    bytes: int | None = None
    """Bytes that it reads and writes at least, where there is a formula."""
    launched_by: str | None = None
    """The host's operation that started a kernel."""

    @property
    def kind(self) -> str:
        """Class of the operation, one of `kernels.KINDS`.

        A kernel without a telling name has the class of the operation that started it.
        """
        own = kind_of(self.name)
        if self.launched_by is None or own in TELLING or is_generated(self.name):
            return own
        started = kind_of(self.launched_by)
        return own if started == "other" else started

    @property
    def end_s(self) -> float:
        """End, from the beginning of the trace."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Trace:
    """The operations of some steps."""

    ops: tuple[Op, ...]
    """Operations and driver calls of the host."""
    kernels: tuple[Op, ...]
    """Kernels and copies of the device; () on a CPU, or when the profiler may not see them."""
    steps: int
    """Steps in the trace."""
    wall_s: float
    """Seconds of all of them, with the profiler's own work."""

    @cached_property
    def work(self) -> tuple[Op, ...]:
        """What computes: the device's kernels, or on a CPU the host's operations."""
        if self.kernels:
            return self.kernels
        return tuple(op for op in self.ops if op.name.startswith(("aten::", "mkldnn::", "c10d::")))

    def busy_s(self) -> float | None:
        """Return the seconds of an average step at which the device works; None on a CPU.

        Moments at which several streams work count once.
        """
        if not self.kernels:
            return None
        total_s, end_s = 0.0, 0.0
        for op in sorted(self.kernels, key=lambda op: op.start_s):
            total_s += max(op.end_s - max(op.start_s, end_s), 0.0)
            end_s = max(end_s, op.end_s)
        return total_s / self.steps

    def shares(self) -> tuple[KernelShare, ...]:
        """Return the time of an average step by class of operation."""
        seconds: defaultdict[str, float] = defaultdict(float)
        calls: Counter[str] = Counter()
        flops: Counter[str] = Counter()
        for op in self.work:
            seconds[op.kind] += op.self_s
            calls[op.kind] += 1
            flops[op.kind] += op.flops or 0
        return tuple(
            KernelShare(
                kind=kind,
                seconds=seconds[kind] / self.steps,
                calls=calls[kind] / self.steps,
                tflops=flops[kind] / seconds[kind] / 1e12
                if flops[kind] and seconds[kind]
                else None,
            )
            for kind in KINDS
            if calls[kind]
        )

    def outermost(self) -> list[Op]:
        """Return the operations of the host that no other operation called."""
        return [
            op
            for op in self.ops
            if op.name.startswith("aten::") and not (op.parent or "").startswith("aten::")
        ]

    def tiny(self) -> tuple[float, float]:
        """Return number and seconds of tiny operations in an average step, with their start."""
        ops = self.kernels or self.outermost()
        tiny = [op for op in ops if op.seconds < TINY_S]
        seconds = sum(op.seconds for op in tiny) + LAUNCH_S * len(tiny)
        return len(tiny) / self.steps, seconds / self.steps

    def counted(self) -> dict[str, float]:
        """Return the operations of an average step, by their names in `Counts`."""
        number, tiny_s = self.tiny()
        ops = self.kernels or self.outermost()
        return {"ops": len(ops) / self.steps, "tiny_ops": number, "tiny_op_s": tiny_s}

    def tiny_share(self) -> float:
        """Return the share of the operations' time, with their start, that tiny ones take."""
        ops = self.kernels or self.outermost()
        total = sum(op.seconds for op in ops) + LAUNCH_S * len(ops)
        return self.tiny()[1] * self.steps / total if total else 0.0

    def matching(self, names: Iterable[str] | re.Pattern[str]) -> list[Op]:
        """Return the host's operations with one of these names, or matching a pattern."""
        if isinstance(names, re.Pattern):
            return [op for op in self.ops if names.search(op.name)]
        wanted = {*names}
        return [op for op in self.ops if op.name in wanted]

    def reads(self) -> list[Op]:
        """Return the operations with which the host reads values of tensors."""
        return self.matching(READS)

    def pageable_copies(self) -> list[Op]:
        """Return the device's copies from or to memory that is not pinned."""
        return [op for op in self.kernels if PAGEABLE.search(op.name)]


@contextmanager
def profiling(device: str, **options: Any) -> Iterator[profile]:
    """Record the operations inside the block; `options` are those of `torch.profiler.profile`."""
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    options = {"with_flops": True, "acc_events": True} | options  # or torch 2.11 warns
    with profile(activities=activities, **options) as profiler:
        yield profiler
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


def read(profiler: profile, *, steps: int, wall_s: float) -> Trace:
    """Return the events of a finished profiler."""
    ops: list[Op] = []
    kernels: list[Op] = []
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        if event.is_user_annotation:
            continue
        if event.device_type == DeviceType.CPU:
            ops.append(_host_op(event))
        else:
            kernels.append(_device_op(event))
    return Trace(tuple(ops), tuple(kernels), steps, wall_s)


def _host_op(event: Any) -> Op:
    parent, within = event.cpu_parent, None
    caller = parent
    while parent is not None and within is None:
        within = parent.name if parent.is_user_annotation else None
        parent = parent.cpu_parent
    while caller is not None and caller.is_user_annotation:
        caller = caller.cpu_parent
    return Op(
        name=event.name,
        start_s=1e-6 * event.time_range.start,
        seconds=1e-6 * event.cpu_time_total,
        self_s=1e-6 * event.self_cpu_time_total,
        on_device=False,
        thread=int(event.thread),
        parent=caller.name if caller is not None else None,
        within=within,
        flops=event.flops or None,
    )


def _device_op(event: Any) -> Op:
    seconds = 1e-6 * (event.time_range.end - event.time_range.start)
    return Op(
        name=event.name,
        start_s=1e-6 * event.time_range.start,
        seconds=seconds,
        self_s=seconds,
        on_device=True,
        thread=int(event.device_resource_id or 0),
        parent=None,
        within=None,
        flops=event.flops or None,
    )
