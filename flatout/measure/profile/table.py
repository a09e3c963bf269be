"""The table of a profile: kernels by class, their time, and their rates against the roof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from flatout.measure.profile.events import Range
from flatout.measure.profile.report import Gap, ProfileRoof, TableRow
from flatout.measure.steps.kernels import KINDS
from flatout.measure.steps.trace import Op

KNOWN_SHARE = 0.8
"""A rate is stated when at least this share of the class's time has known FLOPs or bytes."""
SEPARATE = frozenset({"communication", "copy"})
"""Classes that keep their own row within the optimizer's step."""
NOT_WORK = ("autograd::", "torch::autograd::")
"""Start of the names of operations that only call others."""


def class_of(op: Op) -> str:
    """Return the class of an operation; those in the optimizer's step belong to the optimizer."""
    kind = op.kind
    return "optimizer" if op.within == "optimizer" and kind not in SEPARATE else kind


def work_of(ops: Sequence[Op], kernels: Sequence[Op]) -> list[Op]:
    """Return what computes: the device's kernels, or on a CPU the operations of the host."""
    if kernels:
        return list(kernels)
    return [
        op
        for op in ops
        if ("::" in op.name or op.name.startswith(("graph_", "cpp_", "triton_")))
        and not op.name.startswith(NOT_WORK)
    ]


def table_of(work: Iterable[Op], *, steps: int, roof: ProfileRoof) -> tuple[TableRow, ...]:
    """Return one row per class, the one with the most time first."""
    by_kind: defaultdict[str, list[Op]] = defaultdict(list)
    for op in work:
        by_kind[class_of(op)].append(op)
    total_s = sum(op.self_s for ops in by_kind.values() for op in ops)
    rows = [_row(kind, by_kind[kind], steps, total_s, roof) for kind in KINDS if by_kind.get(kind)]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _row(kind: str, ops: list[Op], steps: int, total_s: float, roof: ProfileRoof) -> TableRow:
    seconds = sum(op.self_s for op in ops)
    by_name: defaultdict[str, float] = defaultdict(float)
    for op in ops:
        by_name[op.name] += op.self_s
    flops_per_s = _rate([(op.self_s, op.flops) for op in ops])
    bytes_per_s = _rate([(op.self_s, op.bytes) for op in ops]) if kind != "other" else None
    tflops = flops_per_s / 1e12 if flops_per_s else None
    gb_per_s = bytes_per_s / 1e9 if bytes_per_s else None
    return TableRow(
        kind=kind,
        seconds=seconds / steps,
        share=seconds / total_s if total_s else 0.0,
        calls=sum(op.on_device or op.bytes != 0 or op.flops not in (None, 0) for op in ops) / steps,
        tflops=tflops,
        of_peak=_ratio(tflops, roof.peak_tflops),
        gb_per_s=gb_per_s,
        of_bandwidth=_ratio(gb_per_s, roof.gb_per_s),
        slowest=max(by_name, key=lambda name: by_name[name]),
    )


def _rate(amounts: list[tuple[float, int | None]]) -> float | None:
    """Return an amount per second; None when too much of the time has no known amount."""
    known = [(seconds, amount) for seconds, amount in amounts if amount is not None]
    known_s, total_s = sum(seconds for seconds, _ in known), sum(part for part, _ in amounts)
    if not known_s or known_s < KNOWN_SHARE * total_s:
        return None
    return sum(amount for _, amount in known) / known_s


def _ratio(value: float | None, roof: float | None) -> float | None:
    return None if value is None or not roof else value / roof


def gaps_of(
    kernels: Sequence[Op], ops: Sequence[Op], step: Range, phases: Sequence[Range]
) -> tuple[Gap, ...]:
    """Return all times of a step at which no kernel runs, the longest first."""
    inside = [op for op in kernels if op.end_s > step.start_s and op.start_s < step.end_s]
    edges = [(step.start_s, step.start_s)]
    for op in sorted(inside, key=lambda op: op.start_s):
        start_s, end_s = edges[-1]
        if op.start_s <= end_s:
            edges[-1] = (start_s, max(op.end_s, end_s))
        else:
            edges.append((op.start_s, op.end_s))
    edges.append((step.end_s, step.end_s))
    found = [(left[1], right[0]) for left, right in pairwise(edges) if right[0] > left[1]]
    found.sort(key=lambda gap: gap[0] - gap[1])
    return tuple(_gap(start_s, end_s, ops, step, phases) for start_s, end_s in found)


def _gap(
    start_s: float, end_s: float, ops: Sequence[Op], step: Range, phases: Sequence[Range]
) -> Gap:
    middle_s = (start_s + end_s) / 2
    phase = next((one for one in phases if one.contains(middle_s)), None)
    host = next(
        (op for op in ops if op.parent is None and op.start_s <= middle_s <= op.end_s), None
    )
    return Gap(
        start_s=start_s - step.start_s,
        seconds=end_s - start_s,
        phase=phase.name if phase else None,
        host_op=host.name if host else None,
    )
