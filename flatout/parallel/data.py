"""Data parallelism: every process has its share of the batch; the model is copied (DDP), split
(fully_shard), or both (HSDP).
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from flatout.parallel.mesh import Mesh

BESIDE_FORWARD = ("logits",)
"""Methods of a model that are called from outside and must find whole weights too. Every process
must call them together.
"""

_BUFFER_SWITCH = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)
"""Buffers are tables here, the same everywhere: nothing to exchange in each forward. torch 2.13
renamed the switch.
"""


def wrap(model: nn.Module, mesh: Mesh, *, gathers: torch.dtype | None = None) -> nn.Module:
    """Return what training calls in place of `model`, whose weights become those of the main
    process everywhere.

    Alone, the model itself. Copied: DDP around it. Split: the model itself, its `blocks` and the
    rest of it sharded in place, so that optimisers must be made afterwards. Both average gradients
    over all processes.

    With `gathers` the blocks' weights travel and are used in that type, under an autocast to it;
    hidden states keep theirs, gradients are summed in fp32, and each process keeps its share of the
    weights as it was. The embedding, the final norm and the output weight are gathered as they are:
    a narrow embedding would make all hidden states narrow.
    """
    if mesh.world_size == 1:
        return model
    if mesh.device_mesh is None:
        devices = [mesh.device] if mesh.device.type == "cuda" else None
        keep_buffers: dict[str, Any] = {_BUFFER_SWITCH: False}
        copied = DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True, **keep_buffers
        )
        _settle_buckets(copied, mesh.device)
        return copied
    _copy_from_main(model)
    placed = mesh.device_mesh if mesh.replicate > 1 else mesh.device_mesh["shard"]
    core: Any = getattr(model, "_orig_mod", model)  # a compiled model shards what it compiled
    narrow = MixedPrecisionPolicy(
        param_dtype=gathers, reduce_dtype=gathers and torch.float32, cast_forward_inputs=False
    )
    for block in core.blocks:
        fully_shard(block, mesh=placed, mp_policy=narrow)
    fully_shard(core, mesh=placed)
    for method in BESIDE_FORWARD:
        if hasattr(core, method):
            register_fsdp_forward_method(core, method)
    return model


class _Untouched(nn.Module):
    """A loss that does not depend on the weights. Gradients arrive as in a backward pass of the
    model: those of its last weights first.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self._weights = weights

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        for weight in self._weights:
            start = start + (weight * 0).sum()
        return start


def _settle_buckets(copied: DistributedDataParallel, device: torch.device) -> None:
    """Bring DDP's buckets into their final order, by one exchange of zero gradients.

    DDP exchanges its first gradients in one bucket, and all later ones in buckets ordered as those
    first gradients arrived. Three or more processes sum a number in an order that depends on its
    place in a bucket, so the first step after a resume would round otherwise than the same step of
    a run that was never stopped.
    """
    model, weights = (
        copied.module,
        [weight for weight in copied.parameters() if weight.requires_grad],
    )
    copied.module = _Untouched(weights)
    copied(torch.zeros((), device=device)).backward()
    copied.module = model
    for weight in weights:
        weight.grad = None


def _copy_from_main(model: nn.Module) -> None:
    """DDP does this by itself; sharding would keep a piece of each process's own weights."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
