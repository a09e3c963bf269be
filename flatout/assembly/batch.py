"""The arithmetic of a step: sequences, processes and micro-batches. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from flatout.assembly.parts import divisors
from flatout.config.schema import RunConfig
from flatout.distributed.layout import Layout
from flatout.errors import ConfigError
from flatout.storage.streams import shortened

DEFAULT_TOKENS_PER_STEP = 65_536
"""Tokens per optimizer step if the configuration sets none of the three batch keys."""


def with_batch(config: RunConfig, layout: Layout) -> RunConfig:
    """Compute tokens_per_step, rows_per_device or accumulate from the other two.

    Raises: ConfigError when they contradict each other or do not divide among the processes.
    """
    batch, seq_len = config.batch, config.data.seq_len
    tokens, rows, accumulate = batch.tokens_per_step, batch.rows_per_device, batch.accumulate
    parts, per_row = layout.context * layout.tensor, layout.world_size // layout.dp_size
    if seq_len % parts:
        key, unit = ("context", 2 * parts) if layout.context > 1 else ("tensor", parts)
        raise ConfigError(
            f"data.seq_len={seq_len} cannot be divided among the processes of "
            f"parallel.{key}={parts}.",
            fix=f"Set data.seq_len={-(-seq_len // unit) * unit}.",
        )
    row_tokens = seq_len * layout.dp_size
    unit = row_tokens * (1 if rows == "auto" else rows) * (accumulate or 1)
    if tokens is None:
        group = row_tokens * layout.pipeline
        usual = max(DEFAULT_TOKENS_PER_STEP // group, 1) * layout.pipeline
        tokens = unit * (usual if rows == "auto" else 1)
    all_stated = accumulate and rows != "auto"
    if tokens % unit or (all_stated and tokens != unit):
        nearest = unit * (1 if all_stated else max(round(tokens / unit), 1))
        factors = f"data.seq_len={seq_len}"
        factors += f" x {layout.dp_size} processes" if layout.dp_size > 1 else ""
        factors += f" ({per_row} of {layout.world_size} share each row)" if per_row > 1 else ""
        factors += f" x batch.rows_per_device={rows}" if rows != "auto" else ""
        factors += f" x batch.accumulate={accumulate}" if accumulate else ""
        raise ConfigError(
            f"batch.tokens_per_step={tokens} does not fit {factors}.",
            fix=f"Set batch.tokens_per_step={nearest}.",
        )
    if rows == "auto" and accumulate is not None:
        rows = tokens // unit
    values: dict[str, Any] = {"batch.tokens_per_step": tokens, "batch.rows_per_device": rows}
    share = tokens // row_tokens
    if rows != "auto":
        values["batch.accumulate"] = share = share // rows
    if share % layout.pipeline:
        raise ConfigError(
            f"A step must have a multiple of parallel.pipeline={layout.pipeline} micro-batches, "
            f"and has {share}.",
            fix=f"Set batch.accumulate={-(-share // layout.pipeline) * layout.pipeline}, with more "
            "tokens per step or fewer rows per device.",
        )
    return config.with_values(values | {"parallel.replicate": layout.replicate})


def sizes_of(config: RunConfig) -> list[int]:
    """Return the numbers of processes among which the steps of a resolved run can be divided."""
    parallel, per_row = config.parallel, config.parallel.per_row
    unit, sequences = parallel.unit, sequences_of(config)
    counts = range(1, sequences + 1)
    groups = (count for count in counts if sequences % (count * parallel.pipeline) == 0)
    return [count * per_row for count in groups if count * per_row % unit == 0]


def sequences_of(config: RunConfig) -> int:
    """Return the sequences of an optimizer step."""
    return (config.batch.tokens_per_step or 0) // config.data.seq_len


def for_world_size(config: RunConfig, world_size: int) -> RunConfig:
    """Return a resolved configuration for a different number of processes, with the same steps.

    The micro-batch keeps its rows, or shrinks to the most that divide a process's share.
    Raises: ConfigError when the sequences of a step cannot be divided.
    """
    parallel, sequences = config.parallel, sequences_of(config)
    sizes = sizes_of(config)
    if world_size not in sizes:
        keys = ("shard", "tensor", "pipeline", "context")
        stated = ", ".join(f"parallel.{key}={getattr(parallel, key)}" for key in keys)
        raise ConfigError(
            f"A step of {sequences} sequences cannot be divided among {world_size} processes "
            f"with {stated}.",
            fix=f"Start {shortened(sizes, 8)} processes." if sizes else "Remove these keys.",
        )
    share = sequences // (world_size // parallel.per_row)
    rows = next(divisors(share // parallel.pipeline, int(config.batch.rows_per_device)))
    return config.with_values(
        {
            "batch.rows_per_device": rows,
            "batch.accumulate": share // rows,
            "parallel.replicate": world_size // parallel.unit,
        }
    )
