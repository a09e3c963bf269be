"""The rate of a run of which nothing has been measured: arithmetic, and the start of operations."""

from __future__ import annotations

from flatout.assembly.memory import Workload, operations_per_step
from flatout.config.schema import RunConfig
from flatout.hardware import ASSUMED_MFU

STARTING_S = 15e-6
"""Assumed seconds to start an operation in eager mode, from Python to its backward pass."""


def assumed_rate(config: RunConfig, whole: float, workload: Workload | None) -> tuple[float, str]:
    """Return the tokens per second of all devices, and what was assumed.

    `whole` is the rate at the peak of matrix products. With the `workload` of an eager run, small
    operations count: a CPU computes after it has started an operation, a GPU meanwhile.
    """
    tokens, started = config.batch.tokens_per_step or 0, _started(config, workload)
    computing = f"an assumed {ASSUMED_MFU:.0%} of the peak"
    if not started or not tokens:
        return ASSUMED_MFU * whole, computing
    computing_s, starting_s = tokens / (ASSUMED_MFU * whole), started * STARTING_S
    starting = f"an assumed {1e6 * STARTING_S:.0f} us to start each of {started:,} operations"
    if not config.train.device.startswith("cuda"):
        return tokens / (computing_s + starting_s), f"{computing}, and {starting} per step"
    if starting_s > computing_s:
        return tokens / starting_s, f"{starting} per step"
    return tokens / computing_s, computing


def _started(config: RunConfig, workload: Workload | None) -> int | None:
    """Return the operations of a step; None for a model that cannot run without values."""
    if workload is None:
        return None
    rows, accumulate = int(config.batch.rows_per_device), config.batch.accumulate or 1
    try:
        return operations_per_step(workload, rows, accumulate)
    except Exception:  # what a custom model raises; the prediction of its memory has shown it
        return None
