"""Whether a run fits into the memory of its device, and which machine it would fit into."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from flatout.assembly.memory import GIB, Workload, estimate, rows_that_fit
from flatout.assembly.plain import USED_MEMORY
from flatout.assembly.prediction import CUDA_CONTEXT, CUDA_RESERVED, MemoryPrediction
from flatout.config.schema import RunConfig
from flatout.errors import HardwareError
from flatout.hardware import Machine, row_named
from flatout.progress import readable_memory
from flatout.registry import MACHINES

COUNTS = tuple(2**power for power in range(11))
"""Numbers of GPUs that are suggested."""


@dataclass(frozen=True)
class Capacity:
    """The memory of one rank, in bytes."""

    whole: int
    """All memory that it could ever have: of the GPU, or on a CPU its share, with swap."""
    free: int
    """What is available now, without swapping."""
    name: str
    """What has it: `GPU` or `machine`."""


def capacity_of(machine: Machine, device: str, local_world_size: int) -> Capacity | None:
    """Return the memory of one rank on `device`; None when the machine has no such device."""
    if device.startswith("cuda"):
        if machine.is_here and torch.cuda.is_available():
            free, whole = torch.cuda.mem_get_info(device)
            return Capacity(whole, free, "GPU")
        if not machine.gpus:
            return None
        whole = int(machine.gpus[0].memory_gib * GIB)
        return Capacity(whole, whole, "GPU")
    memory = int(machine.memory_gib * GIB)
    own = psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available + own, memory)
    whole = memory + psutil.swap_memory().total
    return Capacity(whole // local_world_size, free // local_world_size, "machine")


def require_fitting(
    config: RunConfig, workload: Workload, memory: MemoryPrediction, capacity: Capacity
) -> str | None:
    """Return a warning when a micro-batch fits only by swapping or by luck, else None.

    Raises: HardwareError with the largest micro-batch that fits, when this one certainly does not.
    """
    rows, accumulate = int(config.batch.rows_per_device), config.batch.accumulate or 1
    need = f"batch.rows_per_device={rows} needs about {readable_memory(memory.total)}"
    if memory.least > capacity.whole:
        raise HardwareError(
            f"{need}, and this {capacity.name} has {readable_memory(capacity.whole)}.",
            fix=fewer_rows_advice(workload, rows, accumulate, capacity.whole)
            or _larger_machine_advice(workload),
        )
    # A compiled model needs less than its estimate, by an unknown amount.
    expected = memory.least if memory.error is None else memory.total
    if expected <= capacity.free:
        return None
    need += f", and {readable_memory(capacity.free)} of this {capacity.name} are free"
    advice = fewer_rows_advice(workload, rows, accumulate, capacity.free)
    if memory.on_gpu:
        return f"{need}: it may run out of memory. {advice or _larger_machine_advice(workload)}"
    return f"{need}: it will be much slower if the system swaps. {advice or ''}".rstrip()


def fewer_rows_advice(workload: Workload, rows: int, accumulate: int, available: int) -> str | None:
    """Return the advice to use the largest smaller micro-batch that fits; None if none does."""
    batch = smaller_batch(workload, rows * accumulate, int(USED_MEMORY * available), rows - 1)
    return None if batch is None else f"Set {rows_advice(batch)}"


def rows_advice(batch: tuple[int, int]) -> str:
    """Return the settings of a micro-batch and its accumulation, as the end of a sentence."""
    rows, accumulate = batch
    return (
        f"batch.rows_per_device={rows} batch.accumulate={accumulate}: "
        "the tokens per step stay the same."
    )


def _larger_machine_advice(workload: Workload) -> str:
    machine = smallest_machine(workload)
    larger = f", or use a larger machine, such as {machine} (`flatout plan` compares)"
    return (
        "Not even one sequence fits: shorten data.seq_len or choose a smaller model"
        f"{larger if machine else ''}."
    )


def smaller_batch(
    workload: Workload, rows_per_rank: int, available: int, at_most: int
) -> tuple[int, int] | None:
    """Return the most rows that fit and divide a rank's step, and how often they accumulate.

    Rows that divide the step keep its number of tokens. None if not even one row fits.
    """
    fits = min(most_rows(workload, available), at_most)
    found = next((rows for rows in range(fits, 0, -1) if rows_per_rank % rows == 0), None)
    return (found, rows_per_rank // found) if found else None


def most_rows(workload: Workload, available: int) -> int:
    """Return the most rows of a micro-batch whose tensors fit; 0 when not even one does."""
    try:
        return rows_that_fit(workload, available)
    except HardwareError:
        return 0


def smallest_machine(workload: Workload) -> str | None:
    """Return the smallest known machine that can train with one row per device, as `8x h100-sxm`.

    The number of GPUs comes first, then their memory. More than one GPU means a sharded model.
    """
    rows = sorted(map(row_named, MACHINES.names()), key=lambda row: row.memory_gb.value)
    for count in COUNTS:
        sharded = replace(workload, num_shards=count, on_gpu=True)
        need = estimate(sharded, 1, 2).total * CUDA_RESERVED + CUDA_CONTEXT  # rows that accumulate
        for row in rows:
            if need <= row.memory_gb.value * 1e9:
                how = f" with parallel.shard={count}" if count > 1 else ""
                return f"{count}x {row.name}{how}"
    return None
