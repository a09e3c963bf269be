"""Data parallelism: each process trains on its share of the batch.

The model is copied to every process (DDP), sharded (fully_shard), or both (HSDP).
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
"""Methods besides `forward` that need gathered weights; all processes must call them together."""

_BUFFER_SWITCH = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)
"""The option to synchronise buffers in each forward pass, which torch 2.13 renamed. Buffers here
are tables that are the same in every process.
"""


def wrap(model: nn.Module, mesh: Mesh, *, gathers: torch.dtype | None = None) -> nn.Module:
    """Return the module that training calls in place of `model`, with the main process's weights.

    With one process this is the model itself. A copied model is wrapped in DDP. A sharded model is
    the model itself, with its `blocks` and the rest of it sharded in place, so optimizers must be
    created afterwards. Both average gradients over all processes.

    With `gathers` the weights of the blocks are gathered and used in that dtype, under autocast to
    it; hidden states keep their dtype, gradients are summed in fp32, and each process keeps its
    shard unchanged. The embedding, the final norm and the output weight are gathered in their own
    dtype: a narrow embedding would make all hidden states narrow.
    """
    if mesh.world_size == 1:
        return model
    if mesh.device_mesh is None:
        devices = [mesh.device] if mesh.device.type == "cuda" else None
        options: dict[str, Any] = {_BUFFER_SWITCH: False}
        copied = DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True, **options
        )
        _fix_buckets(copied, mesh.device)
        return copied
    if not any(parameter.is_meta for parameter in model.parameters()):
        _copy_from_main(model)
    device_mesh = mesh.device_mesh if mesh.replicate > 1 else mesh.device_mesh["shard"]
    core: Any = getattr(model, "_orig_mod", model)  # shard the model inside a compiled one
    narrow = MixedPrecisionPolicy(
        param_dtype=gathers, reduce_dtype=gathers and torch.float32, cast_forward_inputs=False
    )
    for block in core.blocks:
        fully_shard(block, mesh=device_mesh, mp_policy=narrow)
    fully_shard(core, mesh=device_mesh)
    for method in BESIDE_FORWARD:
        if hasattr(core, method):
            register_fsdp_forward_method(core, method)
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


def _copy_from_main(model: nn.Module) -> None:
    """Broadcast the main process's weights; DDP does this by itself, sharding does not."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
