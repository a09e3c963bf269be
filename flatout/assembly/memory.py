"""Estimate the memory of a run, part by part, without a GPU and without allocating it.

The model runs forward and backward on tensors that have shapes but no storage, and the bytes that
autograd keeps are summed. The estimate therefore works for any model, op and precision, without
formulas. It is for eager mode; a compiled model keeps less. It excludes the device's context (about
half a GiB on a GPU), kernels' scratch space, the allocator's fragmentation, and copies of the state
in host memory.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from flatout.errors import HardwareError
from flatout.models.language_model import LanguageModel, LanguageModelConfig, ParameterKind
from flatout.ops import Ops
from flatout.parallel.mesh import Mesh

GIB = 2**30
Result = TypeVar("Result")
MOST_ROWS = 2**20
"""Upper bound of the search for the most rows."""


def two_in_fp32(num_weights: int) -> int:
    """Return the bytes of AdamW's two moments for a tensor with this many weights."""
    return 8 * num_weights


@dataclass(frozen=True)
class Workload:
    """Everything that the memory of a run depends on, except the number of rows."""

    model_class: type[LanguageModel]
    model_config: LanguageModelConfig
    seq_len: int
    ops: Ops
    autocast: torch.dtype | None = None
    """Dtype of the matrix products if it differs from the weights'."""
    moments: Callable[[int], int] = two_in_fp32
    """Number of weights of a tensor -> bytes that AdamW keeps for it."""
    with_momentum: frozenset[ParameterKind] = frozenset()
    """Kinds of parameters with one fp32 momentum instead of AdamW's moments."""
    num_shards: int = 1
    """Processes over which weights, gradients and optimizer state are sharded."""
    whole_gradients: bool = False
    """Whether each process keeps unsharded gradients of sharded weights between micro-batches."""
    transforms: tuple[Callable[[LanguageModel, Mesh | None], LanguageModel], ...] = ()
    """Transforms that change what the model keeps; (model, mesh) -> model."""
    document_mask: bool = False
    """Whether attention gets document ids, from which it may build a mask in every block."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a training step."""

    weights: int
    """Parameters and buffers of this process."""
    gradients: int
    """One gradient per parameter of this process."""
    optimizer: int
    """Optimizer state."""
    activations: int
    """Tensors that embedding and blocks keep for backward, with low-precision copies of weights."""
    logits: int
    """Peak of final norm, head and loss, including the logits' gradient."""
    workspace: int
    """Excess of one block's backward over `logits`, and gathered weights if sharded."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(astuple(self))


@lru_cache(maxsize=256)
def estimate(workload: Workload, rows: int) -> MemoryEstimate:
    """Return the memory of a training step with `rows` sequences per micro-batch on one device."""
    with FakeTensorMode():
        model = workload.model_class(workload.model_config, workload.ops)
        for transform in workload.transforms:
            model = transform(model, None)
        activations, in_block = _through_blocks(model, workload, rows)
        logits = _head_peak(model, workload, rows)
    own = sum(_shard_bytes(parameter, workload.num_shards) for parameter in model.parameters())
    gradients = _bytes_of(model.parameters()) if workload.whole_gradients else own
    return MemoryEstimate(
        weights=own + _bytes_of(model.buffers()),
        gradients=gradients,
        optimizer=_optimizer_bytes(model, workload),
        activations=activations,
        logits=logits,
        workspace=max(in_block - logits, 0) + _gathered(model, workload.num_shards),
    )


def rows_that_fit(workload: Workload, available: int) -> int:
    """Return the most rows per micro-batch with which a step needs at most `available` bytes.

    Raises: HardwareError when not even one row fits.
    """
    need = estimate(workload, 1).total
    if need > available:
        raise HardwareError(
            f"One sequence of {workload.seq_len} tokens needs about {need / GIB:.2f} GiB, "
            f"and {available / GIB:.2f} GiB are available.",
            fix="Shorten data.seq_len, choose a smaller model, or shard it with parallel.shard.",
        )
    fits, too_many = 1, 2
    while too_many < MOST_ROWS and estimate(workload, too_many).total <= available:
        fits, too_many = too_many, too_many * 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if estimate(workload, middle).total <= available:
            fits = middle
        else:
            too_many = middle
    return fits


def kept_bytes(run: Callable[[], Result], *, apart_from: Iterable[Tensor]) -> tuple[int, Result]:
    """Return the bytes that autograd keeps for the backward pass of `run()`, and its result.

    Each storage counts once; those of `apart_from` (parameters, a block's input) do not count.
    """
    storages: dict[int, int] = {}
    known = {_storage_id(part) for part in _parts(apart_from)}

    def keep(tensor: Tensor) -> Tensor:
        if _storage_id(tensor) not in known:
            storages[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return sum(storages.values()), result


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the total bytes of tensors created inside the context, and the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage_id(part) for part in _parts(tree_leaves((args, kwargs)))}
        for part in _parts(tree_leaves(result)):
            if _storage_id(part) not in given and _storage_id(part) not in self._seen:
                self._add(part.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def on_free(_: object) -> None:
            self._seen.pop(key, None)
            self.now -= size

        self._seen[key] = weakref.ref(storage, on_free)
        self.now += size
        self.peak = max(self.peak, self.now)


def _through_blocks(model: LanguageModel, workload: Workload, rows: int) -> tuple[int, int]:
    """Return the bytes that embedding and blocks keep, and the most a block's backward adds."""
    tokens_BT = torch.zeros(rows, workload.seq_len, dtype=torch.int64)
    doc_ids_BT = (
        torch.zeros(rows, workload.seq_len, dtype=torch.int32) if workload.document_mask else None
    )
    outside = [*model.parameters(), *model.buffers(), *([] if doc_ids_BT is None else [doc_ids_BT])]
    with _precision(workload):
        total, hidden_BTD = kept_bytes(lambda: model.embed(tokens_BT), apart_from=outside)
    count_of = Counter(repr(block) for block in model.blocks)
    distinct = {repr(block): block for block in model.blocks}
    most = 0
    for name, block in distinct.items():
        input_BTD = hidden_BTD.detach().requires_grad_()
        with _Live() as live, _precision(workload):
            call = partial(block, input_BTD, doc_ids_BT)
            kept, output_BTD = kept_bytes(call, apart_from=outside)
            torch.autograd.backward(output_BTD, torch.empty_like(output_BTD))
        total += kept * count_of[name]
        most = max(most, live.peak - kept)
        model.zero_grad()
    return total, most


def _head_peak(model: LanguageModel, workload: Workload, rows: int) -> int:
    targets_BT = torch.zeros(rows, workload.seq_len, dtype=torch.int64)
    hidden_BTD = model.embed(targets_BT).detach().requires_grad_()
    with _Live() as live, _precision(workload):
        loss_sum, _ = model.ops.cross_entropy(*model.head(hidden_BTD), targets_BT)
        torch.autograd.backward(loss_sum)
    weight_grads = _bytes_of(
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    )
    model.zero_grad()
    return max(int(live.peak) - weight_grads, 0)


def _precision(workload: Workload) -> AbstractContextManager[Any]:
    return (
        nullcontext()
        if workload.autocast is None
        else torch.autocast("cpu", dtype=workload.autocast)
    )


def _gathered(model: LanguageModel, num_shards: int) -> int:
    """Return the bytes of gathered weights when the model is sharded.

    These are the weights outside the blocks, two blocks (one prefetched), and one block's
    gradients.
    """
    if num_shards == 1:
        return 0
    blocks = [_bytes_of(block.parameters()) for block in model.blocks]
    return _bytes_of(model.parameters()) - sum(blocks) + 3 * max(blocks, default=0)


def _optimizer_bytes(model: LanguageModel, workload: Workload) -> int:
    kinds = model.parameter_kinds()
    total = 0
    for name, parameter in model.named_parameters():
        count = _shard_bytes(parameter, workload.num_shards) // parameter.element_size()
        total += 4 * count if kinds[name] in workload.with_momentum else workload.moments(count)
    return total


def _shard_bytes(parameter: nn.Parameter, num_shards: int) -> int:
    """Return the bytes of the largest shard of a parameter, split along its first dimension."""
    slice_rows = math.ceil(parameter.shape[0] / num_shards)
    return slice_rows * math.prod(parameter.shape[1:]) * parameter.element_size()


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    sizes: dict[int, int] = {
        _storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(sizes.values())


def _parts(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`; for a wrapper subclass, the tensors inside it."""
    for value in values:
        if is_traceable_wrapper_subclass(value):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
