"""Estimate the memory of a run, part by part, without a GPU and without allocating it.

The embedding, each kind of block, the head with the loss, and the optimizer's step run on tensors
that have shapes but no storage, and their bytes are counted while they exist. The peak of a step
follows by arithmetic, for any number of blocks. The estimate therefore works for any model, op and
precision, without formulas. It is for eager mode; a compiled model usually needs less. It excludes
the device's context (about half a GiB on a GPU), scratch space inside kernels, the allocator's
fragmentation, and copies of the state in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from flatout.assembly.memory_trace import Live, Part, bytes_of, trace
from flatout.config.sections import LoraConfig, OptimConfig
from flatout.errors import HardwareError
from flatout.models.language_model import LanguageModel, LanguageModelConfig, ParameterKind
from flatout.models.lora import with_adapters
from flatout.ops import Ops
from flatout.optimizers.groups import AdamWSettings, OptimizerParts, ParameterGroup
from flatout.parallel.mesh import Mesh
from flatout.progress import readable_memory
from flatout.registry import OPTIMIZERS

GIB = 2**30
PER_PARAMETER = 4
"""Assumed operations of the optimizer's step per trained tensor."""
FIRST_STEP = 64
"""The second number of rows that is tried: with few, the optimizer's step may need the most."""
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
    gathers: torch.dtype | None = None
    """Dtype in which sharded blocks are gathered if it differs from the weights'."""
    transforms: tuple[Callable[[LanguageModel, Mesh | None], LanguageModel], ...] = ()
    """Transforms that change what the model keeps; (model, mesh) -> model."""
    document_mask: bool = False
    """Whether attention gets document ids, from which it may build a mask in every block."""
    gradients_stay: bool = False
    """Whether gradients keep their memory between steps."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer, whose step may need more memory than the loss."""
    newton_schulz: Callable[[Tensor], Tensor] | None = None
    """Muon's orthogonalisation; None for optimizers that have none."""
    adamw_copies: int = 0
    """Temporary copies of its largest parameter that AdamW's step makes."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters; with them, all other weights have no gradients and no optimizer state."""
    on_gpu: bool = True
    """Whether it runs on a GPU, where some ops work in larger pieces."""


@dataclass(frozen=True)
class Moment:
    """What exists at one moment of a step, besides the weights and the optimizer state."""

    name: str
    gradients: int
    activations: int
    """Tensors kept for backward, with the tokens."""
    transient: int
    """Everything else: what the pass that is running needs for itself."""

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.gradients + self.activations + self.transient


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device in a training step."""

    weights: int
    """Parameters and buffers of this process."""
    gradients: int
    """One gradient per trained parameter of this process."""
    optimizer: int
    """Optimizer state."""
    activations: int
    """Tensors that embedding and blocks keep for backward, with low-precision copies of weights."""
    logits: int
    """Peak of final norm, head and loss, including the logits' gradient."""
    workspace: int
    """Excess of one block's backward over `logits`, and gathered weights if sharded."""
    peak: Moment
    """The moment of the step at which most memory exists; parts do not all exist at once."""
    largest: int = 0
    """The largest tensor that a micro-batch creates."""

    @property
    def fixed(self) -> int:
        """Bytes of weights and optimizer state, which exist throughout."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.fixed + self.peak.total


def estimate(workload: Workload, rows: int, accumulate: int = 1) -> MemoryEstimate:
    """Return the memory of a training step of `accumulate` micro-batches of `rows` sequences."""
    gradients_exist, shards = _gradients_exist(workload, accumulate), workload.num_shards
    traced = _trace_of(replace(workload, gathers=None), rows, accumulate)
    gathered = _trace_of(workload, rows, accumulate) if shards > 1 else traced
    model = traced.model
    own = sum(_shard_bytes(parameter, shards) for parameter in model.parameters())
    trained = _trained(model)
    gradients = sum(_shard_bytes(parameter, shards) for parameter in trained)
    if workload.whole_gradients:
        gradients = bytes_of(trained)
    parts = [traced.embedding, *gathered.blocks]
    activations = traced.inputs + sum(part.kept for part in parts)
    logits = max(traced.head.forward, traced.head.backward)
    in_block = max((part.backward - part.kept for part in gathered.blocks), default=0)
    workspace = max(in_block - logits, 0) + _gathered(gathered.model, shards)
    if shards > 1:
        moments = [Moment("a sharded step", gradients, activations, logits + workspace)]
    else:
        step = Moment("the optimizer's step", gradients, traced.inputs, traced.step)
        moments = [*_micro_batch(traced, gradients if gradients_exist else 0), step]
    return MemoryEstimate(
        weights=own + bytes_of(model.buffers()),
        gradients=gradients,
        optimizer=_optimizer_bytes(model, workload),
        activations=activations,
        logits=logits,
        workspace=workspace,
        peak=max(moments, key=lambda moment: moment.total),
        largest=max(part.largest for part in (traced.embedding, *traced.blocks, traced.head)),
    )


def operations_per_step(workload: Workload, rows: int, accumulate: int = 1) -> int:
    """Return how many operations an eager step starts, without views; the optimizer's are assumed.

    It costs nothing after `estimate` of the same batch.
    """
    traced = _trace_of(workload, rows, accumulate)
    parts = (traced.embedding, *traced.blocks, traced.head)
    in_optimizer = PER_PARAMETER * len(_trained(traced.model))
    return accumulate * sum(part.operations for part in parts) + in_optimizer


def rows_that_fit(workload: Workload, available: int, accumulate: int = 2) -> int:
    """Return the most rows per micro-batch with which a step needs at most `available` bytes.

    Raises: HardwareError when not even one row fits.
    """

    def need(rows: int) -> int:
        return estimate(workload, rows, accumulate).total

    if (least := need(1)) > available:
        raise HardwareError(
            f"One sequence of {workload.seq_len} tokens needs about {readable_memory(least)}, "
            f"and {readable_memory(available)} are available.",
            fix="Shorten data.seq_len, choose a smaller model, or shard it with parallel.shard.",
        )
    fits, step, too_many = 1, FIRST_STEP, MOST_ROWS
    while too_many - fits > 1:
        # The need grows almost in proportion, so guesses from its slope are nearly right.
        middle = min(fits + step, too_many - 1)
        per_row = max((need(middle) - need(fits)) // (middle - fits), 1)
        if need(middle) <= available:
            fits = middle
        else:
            too_many = middle
        step = max((available - need(fits)) // per_row, 1)
    return fits


@dataclass(frozen=True)
class _Traced:
    """A model without values, and its parts in the order of a micro-batch."""

    model: LanguageModel
    inputs: int
    embedding: Part
    blocks: Sequence[Part]
    head: Part
    step: int
    """What the optimizer's step needs beside its state."""


def _gradients_exist(workload: Workload, accumulate: int) -> bool:
    """Return whether gradients exist before a micro-batch."""
    return workload.gradients_stay or accumulate > 1


def _trace_of(workload: Workload, rows: int, accumulate: int) -> _Traced:
    whole = replace(workload, num_shards=1, whole_gradients=False)
    return _trace(whole, rows, _gradients_exist(workload, accumulate))


@lru_cache(maxsize=64)
def _trace(workload: Workload, rows: int, gradients_exist: bool) -> _Traced:
    step = _optimizer_peak(workload)
    with _without_values(workload) as model:
        return _trace_model(model, workload, rows, step, gradients_exist=gradients_exist)


@contextmanager
def _without_values(workload: Workload) -> Iterator[LanguageModel]:
    """Make the model, and in the block all other tensors, without storage."""
    with FakeTensorMode() as mode:
        mode.stands_for = "cuda" if workload.on_gpu else "cpu"  # type: ignore[attr-defined]
        model = workload.model_class(workload.model_config, workload.ops)
        model = with_adapters(model, workload.lora)
        if workload.gathers is not None:
            for module in model.blocks.modules():  # `to` cannot exchange tensors without values
                for name, own in list(module.named_parameters(recurse=False)):
                    narrow = nn.Parameter(own.detach().to(workload.gathers), own.requires_grad)
                    setattr(module, name, narrow)
        for transform in workload.transforms:
            model = transform(model, None)
        yield model


def _trace_model(
    model: LanguageModel, workload: Workload, rows: int, step: int, *, gradients_exist: bool
) -> _Traced:
    shape = (rows, workload.seq_len)
    tokens_BT, targets_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    doc_ids_BT = torch.zeros(shape, dtype=torch.int32) if workload.document_mask else None
    precision = partial(_precision, workload)
    with torch.no_grad(), precision():
        hidden_BTD = model.embed(tokens_BT)
        tied = _tied(model, hidden_BTD)
    entered = (hidden_BTD.shape, hidden_BTD.dtype)
    del hidden_BTD

    def traced(call: Callable[[Any], Tensor], *, is_first: bool = False) -> Part:
        for parameter in _trained(model):
            # Autograd adds both gradients of a tied weight before it touches an existing one.
            exists = gradients_exist and id(parameter) not in tied
            parameter.grad = _like(parameter) if exists else None
        return trace(call, None if is_first else entered, precision)

    def loss(hidden_BTD: Tensor) -> Tensor:
        config, (normed_BTD, weight_VD) = model.config, model.head(hidden_BTD)
        return model.ops.cross_entropy(
            normed_BTD, weight_VD, targets_BT, softcap=config.logit_softcap, z_loss=config.z_loss
        )[0]

    block_of = {repr(block): block for block in model.blocks}
    part_of = {name: traced(partial(_call, block, doc_ids_BT)) for name, block in block_of.items()}
    return _Traced(
        model,
        bytes_of([tokens_BT, targets_BT, *([] if doc_ids_BT is None else [doc_ids_BT])]),
        traced(lambda _: model.embed(tokens_BT), is_first=True),
        [part_of[repr(block)] for block in model.blocks],
        traced(loss),
        step,
    )


def _call(block: nn.Module, doc_ids_BT: Tensor | None, hidden_BTD: Tensor) -> Tensor:
    return block(hidden_BTD, doc_ids_BT)  # type: ignore[no-any-return]


def _tied(model: LanguageModel, hidden_BTD: Tensor) -> set[int]:
    """Return the id of the embedding that is the output weight too, if there is one."""
    _, weight_VD = model.head(hidden_BTD)
    kinds = model.parameter_kinds()
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if kinds[name] == "embedding" and parameter is weight_VD
    }


def _like(parameter: nn.Parameter) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype)


def _micro_batch(traced: _Traced, gradients: int) -> Iterator[Moment]:
    """Yield the moments of a micro-batch that starts with these bytes of gradients."""
    kept = traced.inputs
    yield Moment("the embedding", gradients, kept, traced.embedding.forward)
    kept += traced.embedding.kept
    for part in traced.blocks:
        yield Moment("a block's forward pass", gradients, kept, part.forward)
        kept += part.kept
    head = traced.head
    yield Moment("the loss", gradients, kept, max(head.forward, head.backward))
    gradients += head.gradients
    for part in reversed(traced.blocks):
        own = min(part.kept, part.backward)
        yield Moment("a block's backward pass", gradients, kept, part.backward - own)
        kept -= part.kept
        gradients += part.gradients
    kept -= traced.embedding.kept
    yield Moment("the embedding's gradient", gradients, kept, traced.embedding.backward)


class _Nothing(Optimizer):
    """Stands for AdamW, whose step cannot run without values."""

    def __init__(self, groups: list[ParameterGroup], keywords: AdamWSettings) -> None:
        super().__init__(groups, dict(keywords))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


@lru_cache(maxsize=64)
def _optimizer_peak(workload: Workload) -> int:
    """Return the most that the optimizer's step needs beside its state, for any rows.

    AdamW's need is stated; other optimizers take two steps, of which the first creates the state.
    An optimizer that reads values, as `.item()` does, counts as one that needs nothing.
    """
    with _without_values(workload) as model:
        return _peak_of_step(_trained(model), model, workload)


def _peak_of_step(parameters: list[nn.Parameter], model: LanguageModel, workload: Workload) -> int:
    largest = max((parameter.numel() for parameter in parameters), default=0)
    adamw = 4 * workload.adamw_copies * largest
    if workload.optim.kind == "adamw" or workload.newton_schulz is None:
        return adamw
    for parameter in parameters:
        parameter.grad = _like(parameter)
    parts = OptimizerParts(_Nothing, workload.newton_schulz)
    try:
        optimizers = OPTIMIZERS.get(workload.optim.kind)(model, workload.optim, parts)
        with Live() as live:
            for optimizer in optimizers:
                optimizer.step()
            state = live.now
            live.restart_peak()
            for optimizer in optimizers:
                optimizer.step()
    except RuntimeError:
        return adamw
    return max(adamw, int(live.peak - state))


def _precision(workload: Workload) -> AbstractContextManager[Any]:
    if workload.autocast is None:
        return nullcontext()
    return torch.autocast("cpu", dtype=workload.autocast)


def _gathered(model: LanguageModel, num_shards: int) -> int:
    """Return the bytes of gathered weights when the model is sharded.

    These are the weights outside the blocks, two blocks (one prefetched), and one block's
    gradients.
    """
    if num_shards == 1:
        return 0
    blocks = [bytes_of(block.parameters()) for block in model.blocks]
    return bytes_of(model.parameters()) - sum(blocks) + 3 * max(blocks, default=0)


def _optimizer_bytes(model: LanguageModel, workload: Workload) -> int:
    kinds = model.parameter_kinds()
    total = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        count = _shard_bytes(parameter, workload.num_shards) // parameter.element_size()
        total += 4 * count if kinds[name] in workload.with_momentum else workload.moments(count)
    return total


def _trained(model: LanguageModel) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _shard_bytes(parameter: nn.Parameter, num_shards: int) -> int:
    """Return the bytes of the largest shard of a parameter, split along its first dimension."""
    slice_rows = math.ceil(parameter.shape[0] / num_shards)
    return slice_rows * math.prod(parameter.shape[1:]) * parameter.element_size()
