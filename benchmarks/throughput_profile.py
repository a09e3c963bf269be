"""The device time per step by kind of kernel, from a few profiled steps.

Kernels are classified by name, those of the update by the range that launched them. The names are
those of cuBLAS, cuDNN, flash-attention, Inductor and torch on an NVIDIA GPU; on a CPU the outermost
operators take their place.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

UPDATE = "Optimizer.step"
"""Prefix of the name of an update's range; torch's own optimizers use it."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
COPY, UPDATES, ATTENTION, LOSS, MATMUL, ELEMENTWISE, OTHER, IDLE = GROUPS = (
    "copy",
    "optimiser",
    "attention and scan",
    "loss",
    "matmul",
    "norm and elementwise",
    "other",
    "idle",
)
RULES = tuple(
    (group, re.compile(words, re.IGNORECASE))
    for group, words in (
        (COPY, r"memcpy|memset"),
        (UPDATES, r"multi_tensor_apply|adam|muon|newton_schulz|decay_and_add|::_foreach"),
        (
            LOSS,
            r"log_?softmax|softmax_online|logsumexp|nll_loss|cross_entropy|losses_and_gradient|flatout::loss",
        ),
        (ELEMENTWISE, r"triton_(poi|red|per|for|mix)_"),
        (ATTENTION, r"flash|fmha|sdpa|attention|^(walk|gradients|powers|gradient)$"),
        (
            MATMUL,
            r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|triton_(tem|mm)|::_?(scaled_)?(mm|addmm|bmm|baddbmm|linear|matmul)\b",
        ),
        (
            ELEMENTWISE,
            r"elementwise|norm|reduce|softmax|index|embedding|gather|scatter|catarray|copy|fill|arange|scan|sort|compiled|aten::",
        ),
    )
)
"""The first matching rule decides.

Inductor names a fused kernel after all its operators, so the rules for its kernels precede
attention's.
"""
MOST_NAMES = 8

Event = dict[str, Any]


class ProfiledSteps:
    """Replaces the run's stop check: profiles some steps after the warm-up, then stops."""

    def __init__(self, device: torch.device, warmup_steps: int, steps: int) -> None:
        self._device, self._first, self._most = device, warmup_steps, warmup_steps + steps
        self._steps_started = 0
        on_cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_cuda], acc_events=True)

    def requested(self, run: Any = None) -> bool:
        """Start or stop the profile at the beginning of a step."""
        if self._steps_started in (self._first, self._most):
            self._wait()
            (self._profile.start if self._steps_started == self._first else self._profile.stop)()
        self._steps_started += 1
        return self._steps_started > self._most

    def groups(self, folder: Path) -> dict[str, Any]:
        """Return the profile per step; a trace is written to `folder` and deleted."""
        trace = folder / "trace.json"
        self._profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        trace.unlink()
        return grouped(
            events, steps=self._most - self._first, on_device=self._device.type == "cuda"
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def in_range(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimiser's `step` in a range that identifies its kernels."""

    def ranged(*arguments: Any, **options: Any) -> Any:
        with record_function(UPDATE):
            return update(*arguments, **options)

    return ranged


def grouped(events: Sequence[Event], *, steps: int, on_device: bool = True) -> dict[str, Any]:
    """Return the milliseconds per step of each group and in total, and the longest kernels.

    The total lasts from the start of the first kernel to the end of the last; idle is the part that
    no kernel covers. Concurrent kernels count in each of their groups.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    work = (
        [event for event in complete if event.get("cat") in DEVICE_WORK]
        if on_device
        else outermost(complete)
    )
    if not work:
        return {"steps": steps, "wall_ms": 0.0, "groups": {}, "kernels": []}
    updates = launched_in_updates(complete) if on_device else set()
    by_group: dict[str, float] = defaultdict(float)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in work:
        is_update = (
            event.get("args", {}).get("correlation") in updates
            if on_device
            else event["name"].startswith(UPDATE)
        )
        group = (
            UPDATES
            if is_update and event.get("cat", "kernel") != "gpu_memcpy"
            else group_of(event["name"])
        )
        by_group[group] += event["dur"]
        by_name[group, event["name"]].append(event["dur"])
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in work]
    wall = max(end for _, end in spans) - min(begin for begin, _ in spans)
    by_group[IDLE] = wall - covered(spans)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST_NAMES]
    per_step_ms = 1e-3 / steps
    return {
        "steps": steps,
        "wall_ms": wall * per_step_ms,
        "groups": {
            group: by_group[group] * per_step_ms
            for group in GROUPS
            if by_group[group] or group != OTHER
        },
        "kernels": [
            {
                "group": group,
                "name": name[:120],
                "ms": sum(times) * per_step_ms,
                "launches": len(times) / steps,
            }
            for (group, name), times in longest
        ],
    }


def group_of(name: str) -> str:
    """Return the group of a kernel by its name."""
    return next((group for group, words in RULES if words.search(name)), OTHER)


def launched_in_updates(events: Iterable[Event]) -> set[int]:
    """Return the correlation ids of launches inside an update's range on the same thread."""
    ranges: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    launches: list[Event] = []
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(UPDATE):
            ranges[event.get("tid")].append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get(
            "args", {}
        ):
            launches.append(event)
    merged = {thread: joined(spans) for thread, spans in ranges.items()}
    found = set()
    for event in launches:
        spans = merged.get(event.get("tid"), [])
        at = bisect_right(spans, (event["ts"], float("inf"))) - 1
        if at >= 0 and event["ts"] < spans[at][1]:
            found.add(event["args"]["correlation"])
    return found


def outermost(events: Iterable[Event]) -> list[Event]:
    """Return the operators and updates that are not nested in another on their thread."""
    wanted = [event for event in events if event["name"].startswith(("aten::", UPDATE))]
    ends: dict[Any, float] = {}
    found = []
    for event in sorted(wanted, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event.get("tid"), float("-inf")):
            ends[event.get("tid")] = event["ts"] + event["dur"]
            found.append(event)
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the duration covered by at least one span."""
    return sum(end - begin for begin, end in joined(spans))


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of spans, sorted and disjoint."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
