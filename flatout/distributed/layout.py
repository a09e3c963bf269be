"""The layout of a run's processes: how many there are in each dimension."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.config.sections import ParallelConfig
from flatout.errors import ConfigError
from flatout.progress import counted


@dataclass(frozen=True)
class Layout:
    """The numbers of processes in each dimension. Every field counts one without it."""

    world_size: int = 1
    """All of them: `pipeline` x `replicate` x `shard` x `tensor`."""
    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Processes that weights, gradients and optimizer state are sharded over."""
    tensor: int = 1
    """Processes that share every layer."""
    context: int = 1
    """Processes, of those that are not for `tensor`, that share the tokens of each row."""
    pipeline: int = 1
    """Processes, or groups of them, that have different blocks of the model."""
    num_stages: int = 1
    """Stages that the blocks are divided into: one or several for each of those."""

    @property
    def dp_size(self) -> int:
        """Processes, or groups of them, with separate rows."""
        return self.world_size // (self.context * self.tensor * self.pipeline)


def layout_of(config: ParallelConfig, world_size: int) -> Layout:
    """Return the layout of `world_size` processes.

    Raises: ConfigError when the sizes do not multiply to that number, or context is no divisor.
    """
    shard, tensor, context, pipeline = config.shard, config.tensor, config.context, config.pipeline
    if config.num_stages > pipeline == 1:
        raise ConfigError(
            f"parallel.pipeline_schedule={config.pipeline_schedule} has no effect without "
            "parallel.pipeline.",
            fix="Set parallel.pipeline, or remove it.",
        )
    stated = f"parallel.shard={shard}"
    for key, size in (("tensor", tensor), ("pipeline", pipeline)):
        stated += f" x parallel.{key}={size}" if size > 1 else ""
    if config.replicate == "auto":
        replicate = max(1, world_size // config.unit)
    else:
        replicate = config.replicate
        stated = f"parallel.replicate={replicate} x {stated}"
    processes = replicate * config.unit
    if processes != world_size:
        raise ConfigError(
            f"{stated} does not fit {counted(world_size, 'process', 'processes')}.",
            fix=f"Set train.devices={processes}, start with `torchrun --nproc-per-node {processes} "
            f"-m flatout ...`, or set parallel.replicate=auto and parallel.shard to a divisor of "
            f"the {world_size}.",
        )
    among, key = (shard, "shard") if shard > 1 else (replicate, "replicate")
    if among % context:
        raise ConfigError(
            f"parallel.context={context} does not divide parallel.{key}={among}: groups of that "
            "many processes share rows.",
            fix=f"Set parallel.context to a divisor of {among}, or remove it.",
        )
    stages = config.num_stages
    return Layout(world_size, replicate, shard, tensor, context, pipeline, stages)
