"""The mesh: how the processes of a run are arranged, and how they exchange a few values.

Processes form a rectangle of `replicate` rows and `shard` columns: each row shares one copy of the
model. Every process has its own share of the batch, so losses and counts are summed over all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatout.config.sections import ParallelConfig
from flatout.launch import replicas
from flatout.parallel.rendezvous import Ranks, stated_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The processes of a run, and the position of this one."""

    rank: int
    world_size: int
    local_rank: int
    replicate: int
    shard: int
    device: torch.device
    device_mesh: DeviceMesh | None = None
    """The dimensions `replicate` and `shard`; None if nothing is sharded."""
    local_world_size: int = 1
    """Processes on this machine, which share its memory."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints, and writes the shared files."""
        return self.rank == 0

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over all processes, by one all-reduce in float64, exact up to 2^53.

        Shapes:  any; meant for the few figures of a step.
        Returns: one tensor per argument, with its shape and dtype.
        """
        if self.world_size == 1:
            return tensors
        packed = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
        dist.all_reduce(packed)
        parts = torch.split(packed, [tensor.numel() for tensor in tensors])
        return tuple(
            part.reshape(tensor.shape).to(tensor.dtype)
            for part, tensor in zip(parts, tensors, strict=True)
        )

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast_object(self, value: T) -> T:
        """Return the main process's value, on every process."""
        if self.world_size == 1:
            return value
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0)
        return cast(T, box[0])


def make_mesh(config: ParallelConfig, device: str, ranks: Ranks | None = None) -> Mesh:
    """Return the mesh of `parallel.replicate` and `parallel.shard`, after `rendezvous.connect`.

    Raises: ConfigError when their product is not the number of processes.
    """
    ranks = ranks or (stated_ranks() if dist.is_initialized() else Ranks())
    replicate = replicas(config, ranks.world_size)
    own = torch.device("cuda", ranks.local_rank) if device == "cuda" else torch.device(device)
    device_mesh = None
    if config.shard > 1:
        device_mesh = init_device_mesh(
            own.type, (replicate, config.shard), mesh_dim_names=("replicate", "shard")
        )
    return Mesh(
        ranks.rank,
        ranks.world_size,
        ranks.local_rank,
        replicate,
        config.shard,
        own,
        device_mesh,
        ranks.local_world_size,
    )
