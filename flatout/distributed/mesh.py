"""The mesh: how the processes of a run are arranged, and how they train one model.

Processes form a rectangle of `replicate` rows and `shard` columns: each row shares one copy of the
model. It is copied to every process (DDP), sharded (fully_shard), or both (HSDP). `context`
consecutive processes share the tokens of each row of a batch. The others have separate rows.
With `tensor`, that many consecutive processes are in each place: they share every layer. With
`pipeline`, there are several such rectangles, each with other blocks of the model. Losses and
counts are summed over all processes. Each has those of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from flatout.config.sections import ParallelConfig
from flatout.distributed.context import Context
from flatout.distributed.layout import Layout, layout_of
from flatout.distributed.rendezvous import Ranks, connect_alone, stated_ranks
from flatout.distributed.tensor import TENSOR, cut, split_of
from flatout.errors import ConfigError

BUFFER_SWITCH = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)
"""The option to synchronise buffers in each forward pass, which torch 2.13 renamed. Buffers here
are tables that are the same in every process.
"""
CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Mesh(Layout, Ranks):
    """The processes of a run, and the position of this one."""

    device: torch.device = CPU
    device_mesh: DeviceMesh | None = None
    """The dimensions `pipeline`, if there is one, `replicate`, `shard` and, if layers are shared,
    `tensor`. None: none of it.
    """
    reshard: bool = True
    offloads: bool = False
    """Whether weights, gradients and optimizer state are in host memory."""
    context_group: dist.ProcessGroup | None = None
    """The processes that share this one's rows. None means they are its own."""

    @property
    def weights_device(self) -> torch.device:
        """Where weights, gradients and optimizer state are between uses."""
        return CPU if self.offloads else self.device

    @property
    def dp_rank(self) -> int:
        """The position of this process's rows among `dp_size`."""
        return self.rank // (self.context * self.tensor) % self.dp_size

    def share_rows(self, model: Any, *, seq_len: int) -> None:
        """Let a model compute this process's part of each row, if several share them.

        Raises: ConfigError as `LanguageModel.share_rows`.
        """
        if self.context_group is not None:
            rank, is_balanced = self.rank % self.context, bool(model.divides_rows)
            context = Context(self.context_group, rank, self.context, is_balanced)
            model.share_rows(context, seq_len=seq_len)

    def share_layers(self, model: Any, *, seq_len: int) -> None:
        """Let a model on the meta device compute this rank's part of each layer, if ranks do.

        Raises: ConfigError as `LanguageModel.share_layers`.
        """
        if self.tensor > 1 and self.device_mesh is not None:
            model.share_layers(split_of(self.device_mesh), seq_len=seq_len)
            cut(model, self.device_mesh[TENSOR], model.tensor_cuts())

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints, and writes the shared files."""
        return self.rank == 0

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over all processes, by one all-reduce in float64, exact up to 2^53.

        Shapes:  any; meant for the few numbers of a step.
        Returns: one tensor per argument, with its shape and dtype.
        """
        if self.world_size == 1:
            return tensors
        packed = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
        dist.all_reduce(packed)
        parts = torch.split(packed, [tensor.numel() for tensor in tensors])
        return tuple(
            part.view_as(tensor).to(tensor) for part, tensor in zip(parts, tensors, strict=True)
        )

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value, on every process."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def make_mesh(config: ParallelConfig, device: str, ranks: Ranks | None = None) -> Mesh:
    """Return the mesh of the keys under `parallel`, after `rendezvous.connect`.

    Raises: ConfigError when they do not fit the number of processes.
    """
    ranks = ranks or (stated_ranks() if dist.is_initialized() else Ranks())
    layout = layout_of(config, ranks.world_size)
    own = torch.device("cuda", ranks.local_rank) if device == "cuda" else torch.device(device)
    device_mesh, offloads = None, config.offload == "cpu"
    if offloads and own.type == "mps":
        raise ConfigError(
            "parallel.offload=cpu has no use on a Mac, whose GPU uses the memory of the CPU.",
            fix="Remove parallel.offload.",
        )
    if offloads and ranks.world_size == 1:
        connect_alone(own)
    if config.is_sharded:
        shape = (config.pipeline, layout.replicate, config.shard, config.tensor)
        names = ("pipeline", "replicate", "shard", TENSOR)
        first, end = int(config.pipeline == 1), 4 if config.tensor > 1 else 3
        device_mesh = init_device_mesh(own.type, shape[first:end], mesh_dim_names=names[first:end])
    group = None
    if config.context > 1:
        group = init_device_mesh(
            own.type,
            (ranks.world_size // config.context, config.context),
            mesh_dim_names=("data", "context"),
        ).get_group("context")
    return Mesh(
        **asdict(ranks) | asdict(layout),
        reshard=config.reshard,
        offloads=offloads,
        context_group=group,
        device=own,
        device_mesh=device_mesh,
    )


def wrap(
    model: nn.Module,
    mesh: Mesh,
    *,
    gathers: torch.dtype | None = None,
    stages: Sequence[Any] = (),
) -> nn.Module:
    """Return the module that training calls in place of `model`, with rank 0's weights.

    With one process this is the model itself, unless its weights stay in host memory. A copied
    model is wrapped in DDP. A sharded model is the model itself, with its `blocks` and the rest of
    it sharded in place, so optimizers must be created afterwards. Of a pipeline, each of the
    `stages` is. Both average gradients over all processes with the same weights.

    With `gathers` the weights of the blocks are gathered and used in that dtype, under autocast to
    it. Hidden states keep their dtype, gradients are summed in fp32, and each process keeps its
    shard unchanged. The embedding, the final norm and the output weight are gathered in their own
    dtype: a narrow embedding would make all hidden states narrow.
    """
    if mesh.device_mesh is None and mesh.world_size == 1:
        return model
    if mesh.device_mesh is None:
        devices = [mesh.device] if mesh.device.type == "cuda" else None
        options: dict[str, Any] = {BUFFER_SWITCH: False}
        copied = DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True, **options
        )
        _fix_buckets(copied, mesh.device)
        return copied
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    for tensor in [*model.parameters(), *model.buffers()]:  # DDP does this by itself
        if not tensor.is_meta:  # else every rank will draw the same weights
            dist.broadcast(tensor.detach(), src=0)
    names = ("replicate", "shard") if mesh.replicate > 1 else ("shard",)
    core: Any = model
    narrow = MixedPrecisionPolicy(
        param_dtype=gathers, reduce_dtype=gathers and torch.float32, cast_forward_inputs=False
    )
    shared: dict[str, Any] = {"mesh": mesh.device_mesh[names], "offload_policy": OffloadPolicy()}
    if mesh.offloads:
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    blocks = {id(block) for block in core.blocks}
    roots: Any = stages or [core]
    for root in roots:
        for layer in root.layers:
            # backward begins with the last layer; modules of users may compute with fp32 weights
            keeps = layer is root.layers[-1] or not mesh.reshard
            policy: dict[str, Any] = {"mp_policy": narrow} if id(layer) in blocks else {}
            fully_shard(layer, reshard_after_forward=not keeps, **policy, **shared)
        # a tied embedding is read again at the end
        if root is core and getattr(core, "unembedding", None) is not None:
            fully_shard(core.token_embedding, **shared)
        fully_shard(root, **shared)
    if not stages and hasattr(
        core, "logits"
    ):  # it needs gathered weights, so all processes must call it together
        register_fsdp_forward_method(core, "logits")
    return model


class _ZeroGradients(nn.Module):
    """A loss whose gradients are zero and arrive as in a backward pass: last weights first."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self._weights = weights

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        for weight in self._weights:
            start = start + (weight * 0).sum()
        return start


def _fix_buckets(copied: DistributedDataParallel, device: torch.device) -> None:
    """Bring DDP's buckets into their final order by reducing zero gradients once.

    DDP reduces its first gradients in one bucket, and all later ones in buckets in the order in
    which those first gradients arrived. With three or more processes the order of summation depends
    on the position in a bucket, so the first step after a resume would round differently than the
    same step of an uninterrupted run. The gradients, all zero, remain views of the buckets.
    """
    model, weights = copied.module, [p for p in copied.parameters() if p.requires_grad]
    copied.module = _ZeroGradients(weights)
    copied(torch.zeros((), device=device)).backward()
    copied.module = model
