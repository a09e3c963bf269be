"""The sizes of a step and how processes divide it, without torch, whose import takes seconds."""

from __future__ import annotations

from typing import Any

from flatout.config.schema import RunConfig
from flatout.errors import ConfigError

DEFAULT_TOKENS_PER_STEP = 65_536
"""Tokens per optimizer step if the configuration sets none of the three batch keys."""


def resolve_batch(config: RunConfig, world_size: int) -> RunConfig:
    """Compute tokens_per_step, rows_per_device or accumulate from the other two.

    Raises: ConfigError when they contradict each other or do not divide among the processes.
    """
    batch, seq_len = config.batch, config.data.seq_len
    tokens, rows, accumulate = batch.tokens_per_step, batch.rows_per_device, batch.accumulate
    row_tokens = seq_len * world_size
    if tokens is None and rows != "auto":
        tokens = rows * (accumulate or 1) * row_tokens
    if tokens is None:
        tokens = max(DEFAULT_TOKENS_PER_STEP // row_tokens, 1) * row_tokens * (accumulate or 1)
    per_micro_batch = (
        row_tokens * (1 if rows == "auto" else rows) * (1 if accumulate is None else accumulate)
    )
    all_stated = accumulate and rows != "auto"
    if tokens % per_micro_batch or (all_stated and tokens != per_micro_batch):
        nearest = (
            per_micro_batch
            if all_stated
            else max(round(tokens / per_micro_batch), 1) * per_micro_batch
        )
        parts = f"data.seq_len={seq_len}" + (f" x {world_size} processes" if world_size > 1 else "")
        parts += f" x batch.rows_per_device={rows}" if rows != "auto" else ""
        parts += f" x batch.accumulate={accumulate}" if accumulate else ""
        raise ConfigError(
            f"batch.tokens_per_step={tokens} does not fit {parts}.",
            fix=f"Set batch.tokens_per_step={nearest}.",
        )
    if rows == "auto" and accumulate is not None:
        rows = tokens // (row_tokens * accumulate)
    values: dict[str, Any] = {"batch.tokens_per_step": tokens, "batch.rows_per_device": rows}
    if rows != "auto":
        values["batch.accumulate"] = tokens // (row_tokens * rows)
    return config.with_values(values)


def for_world_size(config: RunConfig, world_size: int) -> RunConfig:
    """Return a resolved configuration for another number of processes, with the same steps.

    The micro-batch keeps its rows, or shrinks to the most that divide a process's share.
    Raises: ConfigError when the sequences of a step cannot be divided.
    """
    sequences = (config.batch.tokens_per_step or 0) // config.data.seq_len
    if sequences % world_size or world_size % config.parallel.shard:
        raise ConfigError(
            f"A step of {sequences} sequences cannot be divided among {world_size} processes "
            f"with parallel.shard={config.parallel.shard}.",
            fix=f"Use a number of processes that divides {sequences} "
            "and is a multiple of parallel.shard.",
        )
    share = sequences // world_size
    rows = next(
        rows
        for rows in range(min(int(config.batch.rows_per_device), share), 0, -1)
        if share % rows == 0
    )
    return config.with_values(
        {
            "batch.rows_per_device": rows,
            "batch.accumulate": share // rows,
            "parallel.replicate": world_size // config.parallel.shard,
        }
    )
