"""Records steps with torch.profiler and reads the trace: operations, kernels, phases.

    with profiling(device) as profiler, phase_ranges(timer):
        ...  # some steps
    profiler.export_chrome_trace(path)
    trace = read_trace(document_in(path), steps=2)

The trace is Chrome's JSON, which is the same in all versions of torch. Lines of user code come
from `calls.py`: the profiler's stacks lack them.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flatout.errors import RunFailed
from flatout.measure.evidence import KernelRow
from flatout.training.metrics.phases import GC, PhaseTimer

PREFIX = "flatout."
"""Start of the names of the ranges of phases, and of the marks at which steps start."""
TINY_S = 20e-6
"""An operation that takes less costs about as much to start as to run."""
LAUNCH_S = 5e-6
"""Host time that starting one operation takes at least, added to the time of tiny ones."""
SEPARATE = frozenset({"communication", "copy"})
"""Classes that operations in the optimizer's step keep. The others become `optimizer`."""
NOT_WORK = ("autograd::", "torch::autograd::")
"""Start of the names of operations that only call others."""
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})

MEMORY_BOUND = frozenset({"normalisation", "elementwise", "reduction", "copy"})
"""Classes that are limited by memory bandwidth: they do a few operations per byte."""
_PATTERNS = (
    ("communication", r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter|broadcast_kernel|c10d"),
    (
        "optimizer",
        r"fused_(adam|sgd)|fusedadam|foreach|multi_tensor|optimizer\.step|newton_schulz|"
        r"clip_grad|linalg_vector_norm",
    ),
    ("decomposition", r"linalg_(?!vector_norm)|\bsvd|\beigh?\b|\bqr\b|cholesky"),
    ("loss", r"cross_entropy|nll_loss|log_softmax|linear_cross"),
    (
        "attention",
        r"attention|flash|fmha|mem_eff|sdpa|_softmax",
    ),
    ("scan", r"cumsum|cumprod|associative_scan|_scan|fft"),
    ("normalisation", r"(layer|batch|group|rms|instance)_?norm|rsqrt"),
    (
        "matmul",
        r"gemm|cutlass|cublas|nvjet|xmma|wgmma|matmul|addmm|addmv|baddbmm|\bb?mm\b|_linear|"
        r"\blinear\b|convolution|conv\dd|einsum",
    ),
    (
        "copy",
        r"memcpy|memset|copy_|_to_copy|\bto\b|clone|contiguous|\bcat\b|catarray|index|gather|"
        r"scatter|embedding|transpose|slice_backward|\bzeros?_?\b|fill|\bstack\b",
    ),
    ("reduction", r"reduce|\bsum\b|\bmean\b|\bmax\b|\bmin\b|amax|\bnorm\b|argmax|\bvar\b"),
    (
        "elementwise",
        r"elementwise|\badd_?\b|\bsub_?\b|\bmul_?\b|\bdiv_?\b|\bpow\b|\bexp\b|\blog\b|gelu|silu|"
        r"relu|sigmoid|tanh|dropout|where|masked|\bneg\b|sqrt|\bsin\b|\bcos\b|clamp|addcmul|"
        r"addcdiv|lerp|\beq\b|\bne\b|\bge\b|\bgt\b|\ble\b|\blt\b",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
_GENERATED = re.compile(r"^(?:graph_\w*?)?(triton|cpp)_(poi|red|per|mm|tem|for|spl)?_?_?fused_?")
"""How torch.compile names the kernels that it generates, before the operations fused in them."""
_OF_GENERATED = {
    "poi": "elementwise",
    "red": "reduction",
    "per": "reduction",
    "mm": "matmul",
    "tem": "matmul",
    "for": "optimizer",
    "spl": "scan",
}
TELLING = frozenset({"communication", "copy", "attention"})
"""Classes that a kernel's own name decides, whatever operation started it."""


def is_generated(name: str) -> bool:
    """Return whether torch.compile generated the kernel."""
    return _GENERATED.match(name) is not None


@cache
def kind_of(name: str) -> str:
    """Return the class of an operation (`aten::mm`) or a kernel.

    A kernel that torch.compile generated has the class of the rarest operation fused in it:
    loss, attention, scan, normalisation, or else that of its shape.
    """
    word = name.removeprefix("aten::").lower()
    generated = _GENERATED.match(word)
    if generated:
        fused = {kind for kind, pattern in _COMPILED if pattern.search(word.replace("_", " "))}
        fused |= {kind for kind, pattern in _COMPILED[:7] if pattern.search(word)}
        named = next(
            (kind for kind in ("loss", "attention", "scan", "normalisation") if kind in fused), None
        )
        return named or _OF_GENERATED.get(generated[2] or "", "elementwise")
    return next((kind for kind, pattern in _COMPILED if pattern.search(word)), "other")


@dataclass
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
    parent: str | None = None
    """The operation that called it."""
    within: str | None = None
    """The phase in which the host started it."""
    launched_by: str | None = None
    """The host's operation that started a kernel."""

    @property
    def kind(self) -> str:
        """Class of the operation, as `kernels.kind_of` names it.

        A kernel without a telling name has the class of the operation that started it.
        """
        kind = kind_of(self.name)
        if self.launched_by and kind not in TELLING and not is_generated(self.name):
            started = kind_of(self.launched_by)
            kind = kind if started == "other" else started
        return "optimizer" if self.within == "optimizer" and kind not in SEPARATE else kind

    @property
    def end_s(self) -> float:
        """End, from the beginning of the trace."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Trace:
    """Everything that is read from the trace of some steps, in order of time."""

    ops: tuple[Op, ...]
    """Operations of the host."""
    kernels: tuple[Op, ...]
    """Kernels and copies of the device. () on a CPU, or when the profiler may not see them."""
    steps: int
    """Steps in the trace."""

    @cached_property
    def work(self) -> tuple[Op, ...]:
        """What computes: the device's kernels, or on a CPU the host's operations."""
        return self.kernels or tuple(op for op in self.ops if _computes(op.name))

    def busy_s(self) -> float | None:
        """Return the seconds of an average step at which the device works. None on a CPU.

        Moments at which several streams work count once.
        """
        if not self.kernels:
            return None
        total_s, end_s = 0.0, 0.0
        for op in sorted(self.kernels, key=lambda op: op.start_s):
            total_s += max(op.end_s - max(op.start_s, end_s), 0.0)
            end_s = max(end_s, op.end_s)
        return total_s / self.steps

    def table(self) -> tuple[KernelRow, ...]:
        """Return one row per class of the work, the one with the most time first."""
        seconds, calls = defaultdict[str, float](float), Counter[str]()
        for op in self.work:
            kind, parent = op.kind, op.parent or ""
            seconds[kind] += op.self_s
            calls[kind] += not (_computes(parent) and kind_of(parent) == kind)
        total_s = sum(seconds.values()) or 1.0
        rows = (
            KernelRow(
                kind=kind,
                seconds=kind_s / self.steps,
                share=kind_s / total_s,
                calls=calls[kind] / self.steps,
            )
            for kind, kind_s in seconds.items()
        )
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    def counted(self, work_s: float) -> dict[str, float]:
        """Return the operations of an average step, by their names in `Evidence`.

        On a CPU only those count that no other operation called, and tiny ones by their share of
        `work_s`: the seconds of a step that no profiler slows down.
        """
        ops = self.kernels or [
            op
            for op in self.ops
            if op.name.startswith("aten::") and not (op.parent or "").startswith("aten::")
        ]
        tiny = [op.seconds + LAUNCH_S for op in ops if op.seconds < TINY_S]
        tiny_s, total_s = sum(tiny) / self.steps, sum(op.seconds + LAUNCH_S for op in ops)
        if not self.kernels:
            tiny_s = work_s * sum(tiny) / total_s if total_s else 0.0
        number, tiny_number = len(ops) / self.steps, len(tiny) / self.steps
        return {"ops": number, "tiny_ops": tiny_number, "tiny_op_s": tiny_s}


def _computes(name: str) -> bool:
    """Return whether an operation of the host does work, rather than only call others."""
    return ("::" in name or is_generated(name)) and not name.startswith(NOT_WORK)


@contextmanager
def profiling(device: str, **options: Any) -> Iterator[profile]:
    """Record the operations inside the block. `options` are those of `torch.profiler.profile`."""
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True, **options) as profiler:
        yield profiler
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


@contextmanager
def phase_ranges(timer: PhaseTimer) -> Iterator[None]:
    """Make each phase of a timer a range of the trace inside the block.

    The garbage collector is none: it may run where torch must not be called. Nor is what belongs to
    no phase, which may begin inside of torch's own ranges.
    """
    ranges: list[Any] = []

    def change(name: str | None) -> None:
        before(name)
        if name is not None:
            range_of = nullcontext if name in (GC, "other") else record_function
            ranges.append(range_of(PREFIX + name.removesuffix("_wait")))
            ranges[-1].__enter__()
        elif ranges:
            ranges.pop().__exit__(None, None, None)

    before, timer.on_change = timer.on_change, change
    try:
        yield
    finally:
        timer.on_change = before
        for each in reversed(ranges):
            each.__exit__(None, None, None)


def document_in(path: Path) -> dict[str, Any]:
    """Return the trace in a file.

    Raises: RunFailed when it is not complete: the profiler does not report a disk that is full.
    """
    try:
        # a rate over 0 s is inf there, which is no JSON
        document: dict[str, Any] = json.loads(path.read_bytes(), parse_constant=lambda _: None)
        document["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFailed(
            f"The profiler could not write its trace to {path.parent}.",
            fix="The usual cause is a full disk: free space there, use --out on a different disk, "
            "or profile fewer steps with --steps.",
        ) from error
    return document


def read_trace(document: Mapping[str, Any], *, steps: int) -> Trace:
    """Return what a trace contains."""
    events = [one for one in document["traceEvents"] if "ts" in one]
    events.sort(key=lambda one: (float(one["ts"]), -float(one.get("dur", 0.0))))
    ops: list[Op] = []
    kernels: list[Op] = []
    phases: list[tuple[float, str]] = []  # that run at the time of the event: end, name
    callers: defaultdict[Any, list[Op]] = defaultdict(list)  # that run, by thread
    by_id: dict[Any, Op] = {}
    launched: dict[Any, str | None] = {}  # phase in which the host started a kernel
    for event in events:
        kind, name, known = event.get("cat"), str(event["name"]), event.get("args", {})
        start_s = 1e-6 * (float(event["ts"]) - float(events[0]["ts"]))
        seconds = 1e-6 * float(event.get("dur", 0.0))
        while phases and phases[-1][0] <= start_s:
            phases.pop()
        within = phases[-1][1] if phases else None
        if kind == "user_annotation" and name.startswith(PREFIX):
            phases.append((start_s + seconds, name.removeprefix(PREFIX)))
        elif kind == "cpu_op":
            running = callers[event.get("tid")]
            while running and running[-1].end_s <= start_s:
                running.pop()
            op = Op(name, start_s, seconds, seconds, within=within)
            if running:
                op.parent = running[-1].name
                running[-1].self_s = max(running[-1].self_s - seconds, 0.0)
            running.append(op)
            ops.append(op)
            by_id[known.get("External id")] = op
        elif kind in RUNTIME:
            launched[known.get("correlation")] = within
        elif kind in DEVICE:
            by = by_id.get(known.get("External id"))
            phase = launched.get(known.get("correlation"), by.within if by else within)
            kernel = Op(name, start_s, seconds, seconds, within=phase)
            kernel.launched_by = by.name if by else None
            kernels.append(kernel)
    return Trace(tuple(ops), tuple(kernels), steps)
