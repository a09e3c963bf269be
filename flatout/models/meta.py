"""Models on the meta device: allocated shard by shard, and drawn tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatout.config.schema import RunConfig
from flatout.distributed.tensor import TENSOR, Cut, is_shared
from flatout.models.language_model import DRAWS, LanguageModel, model_of
from flatout.models.lora import Adapter
from flatout.ops import Ops


def new_model(config: RunConfig, ops: Ops) -> LanguageModel:
    """Return the model of a configuration on the meta device, if its class allows it.

    Any other is built on the CPU: it may compute buffers in its constructor, or draw otherwise.
    """
    model_class, model_config = model_of(config)
    if not vars(model_class).get("draws_everything"):
        return model_class(model_config, ops)
    return model_class.on_meta(model_config, ops)


def allocate(
    model: LanguageModel,
    device: torch.device | str,
    *,
    draws: bool,
    weights_device: torch.device | str | None = None,
) -> None:
    """Move a model that `new_model` returned to `device`. With `draws`, draw its weights.

    Only its buffers are moved there if its weights have a `weights_device`.

    Every rank draws whole tensors on the CPU, one by one in the order of `init_weights`, and keeps
    its part: the values depend neither on the device nor on the number of ranks. Without `draws`
    the weights are arbitrary. Cost: about a second per 100 million weights drawn; memory for the
    rank's part of the model, and for its largest tensor.
    """
    is_meta = any(parameter.is_meta for parameter in model.parameters())

    def moved(tensor: Tensor) -> Tensor:
        is_weight = isinstance(tensor, nn.Parameter)
        target = weights_device if is_weight and weights_device is not None else device
        if not is_meta:
            return tensor.to(target)
        if is_shared(tensor):
            return torch.empty_like(tensor, device=target)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=target)

    model._apply(moved)  # type: ignore[no-untyped-call]
    if is_meta and draws:
        cuts = model.tensor_cuts()
        with _DrawsWhole({p: cuts.get(name) for name, p in model.named_parameters()}):
            model.init_weights()
            for module in model.modules():
                if isinstance(module, Adapter):
                    module.init_weights()


def boxes_of(tensor: Tensor, cut: Cut | None = None) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return this rank's boxes of a tensor: where each starts in the whole, and its values.

    It is one box, unless ranks share several matrices that the tensor stacks, as `cut` describes.

    Shapes: tensor of any shape; the values share its memory.
    """
    if not is_shared(tensor):
        return [((0,) * tensor.dim(), tensor.detach())]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, part = tensor.device_mesh, tensor.to_local().detach()
    # The public API has no offset of a DTensor's local part. torch's own checkpoints use this too.
    _, starts = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    if cut is None or len(cut.parts) == 1 or TENSOR not in (mesh.mesh_dim_names or ()):
        return [(tuple(starts), part)]
    dim, rank, size = cut.dim, mesh.get_local_rank(TENSOR), mesh.size(-1)
    first = starts[dim] - rank * (tensor.shape[dim] // size)  # in what this group's rank has
    boxes, before, done = [], 0, 0
    for rows in cut.parts:
        share = rows // size
        low, high = max(first, done), min(first + part.shape[dim], done + share)
        if low < high:
            there = list(starts)
            there[dim] = before + rank * share + low - done
            boxes.append((tuple(there), part.narrow(dim, low - first, high - low)))
        before, done = before + rows, done + share
    return boxes


class _DrawsWhole(TorchFunctionMode):
    """Draws whole tensors in fp32 on the CPU, and copies this rank's part of them."""

    def __init__(self, cuts: Mapping[Tensor, Cut | None]) -> None:
        super().__init__()
        self._cuts = cuts

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if func not in DRAWS or not isinstance(target, Tensor):
            return func(*args, **kwargs)
        whole = torch.empty(target.shape)
        func(whole, *args[1:], **{key: one for key, one in kwargs.items() if key != "tensor"})
        with torch.no_grad():
            for there, here in boxes_of(target, self._cuts.get(target)):
                box = zip(there, here.shape, strict=True)
                here.copy_(whole[tuple(slice(start, start + size) for start, size in box)])
        return target
