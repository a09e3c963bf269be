"""Estimate the memory of a run, part by part, and check whether it fits its device.

The embedding, each kind of block, the head with the loss, and the optimizer's step run on tensors
that have shapes but no storage, and their bytes are counted while they exist. The peak of a step
follows by arithmetic, for any number of blocks. The estimate therefore works for any model, op and
precision, without a GPU and without formulas. It is for eager mode. A compiled model usually needs
less. It excludes the device's context (about half a GiB on a GPU), scratch space inside kernels,
the allocator's fragmentation, and copies of the state in host memory.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from flatout.assembly.choices import parts_of
from flatout.assembly.parts import Parts, drop_gradients
from flatout.config.registry import OPTIMIZERS
from flatout.config.schema import RunConfig
from flatout.config.sections import LoraConfig, OptimConfig, ParallelConfig
from flatout.distributed.pipeline import LAST
from flatout.distributed.tensor import Split
from flatout.hardware.machine import GIB, Machine
from flatout.models.language_model import LanguageModel, LanguageModelConfig, model_of
from flatout.models.lora import with_adapters
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy, scan
from flatout.optim.adamw import per_parameter
from flatout.optim.groups import (
    AdamWSettings,
    LightOptimizer,
    OptimizerParts,
    ParameterGroup,
)

CUDA_CONTEXT = GIB // 2
"""Assumed memory of the CUDA context and the libraries' workspaces, which depends on the GPU."""
CUDA_RESERVED = 1.1
"""Assumed ratio of what torch's allocator reserves to what is allocated."""
USED_MEMORY = 0.8
"""Share of the memory that a micro-batch may fill, by estimate."""
PER_PARAMETER = 12
"""Assumed operations per trained tensor in the step of an AdamW that loops over them."""
CHUNKS = 3
"""Chunks of the loss that are traced."""
PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of the settings by which blocks differ."""


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
    """Bytes on one device in a training step, as traced."""

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
    peak: Moment
    """The moment of the step at which most memory exists. Parts do not all exist at once."""
    largest: int
    """The largest tensor that a micro-batch creates."""
    operations: int
    """Operations that an eager step starts, without views."""
    in_optimizer: int
    """Those among them that are in the optimizer's step."""
    optimizer_flops: int
    """FLOPs of matmuls in the optimizer's step."""
    host: int = 0
    """Weights, gradients and optimizer state of this process in host memory."""

    @property
    def total(self) -> int:
        """Bytes at the peak. Weights and optimizer state exist throughout."""
        return self.weights + self.optimizer + self.peak.total


@dataclass(frozen=True)
class Workload:
    """Everything that the memory of a run depends on, except the number of rows."""

    model_class: type[LanguageModel]
    model_config: LanguageModelConfig
    seq_len: int
    ops: Ops
    autocast: torch.dtype | None
    """Dtype of the matmuls if it differs from the weights'."""
    moments: Callable[[int], int]
    """Number of weights of a tensor -> bytes that AdamW keeps for it."""
    gathers: torch.dtype | None
    """Dtype in which sharded blocks are gathered if it differs from the weights'."""
    activations: Callable[[LanguageModel], object] | None
    """Changes what the layers of a model keep for backward."""
    document_mask: bool
    """Whether attention gets document ids, from which it may build a mask in every block."""
    gradients_stay: bool
    """Whether gradients keep their memory between steps."""
    optim: OptimConfig
    """The optimizer, whose step may need more memory than the loss."""
    newton_schulz: Callable[[Tensor], Tensor]
    """Muon's orthogonalisation."""
    adamw_copies: int
    """Temporary copies of its largest parameter that AdamW's step makes."""
    lora: LoraConfig
    """Adapters. With them, all other weights have no gradients and no optimizer state."""
    on_gpu: bool
    """Whether it runs on a GPU, where some ops work in larger pieces."""
    parallel: ParallelConfig

    @property
    def offloads(self) -> bool:
        """Whether shards are in host memory."""
        return self.parallel.offload == "cpu" and self.on_gpu


def workload_of(config: RunConfig, parts: Parts | None = None) -> Workload:
    """Return the workload of a resolved configuration, from which its memory is estimated.

    `parts` replace those of its speedups.
    """
    (model_class, model_config), parallel = model_of(config), config.parallel
    parts, on_gpu = parts or parts_of(config), config.train.device.startswith("cuda")
    return Workload(
        model_class,
        model_config,
        config.data.seq_len // parallel.context,
        parts.ops(),
        parts.precision.dtype(),
        moments=parts.moments,
        gathers=gather_dtype(model_class, parts) if parallel.is_sharded else None,
        activations=parts.activations,
        document_mask=config.data.document_mask,
        gradients_stay=parts.zero_grad is not drop_gradients
        or parallel.replicate not in (1, "auto"),
        optim=config.optim,
        lora=config.lora,
        newton_schulz=parts.newton_schulz,
        adamw_copies=3 if parts.optimizer is per_parameter else 0,
        on_gpu=on_gpu,
        parallel=parallel,
    )


def gather_dtype(model_class: type[LanguageModel], parts: Parts) -> torch.dtype | None:
    """Return the dtype in which sharded weights of the blocks are gathered. None keeps their own.

    Matmuls under autocast round their weights to bfloat16 anyway, so for them the rounding only
    happens earlier, at half the traffic. The gains of norms, which autocast leaves in fp32, are
    rounded too. Gradients are summed in fp32. Other models may need fp32: the eigenvalues of
    `eigenstate` are close to 1, where bfloat16 values are 1/256 apart.
    """
    is_narrow = issubclass(model_class, Transformer) and parts.precision.autocast == "bfloat16"
    return torch.bfloat16 if is_narrow else None


def estimate(workload: Workload, rows: int, accumulate: int = 1) -> MemoryEstimate:
    """Return the memory of a training step of `accumulate` micro-batches of `rows` sequences.

    Of a pipeline, it is that of the first process, which keeps most micro-batches for backward, and
    has the embedding, with the logits of the last one.
    """
    parallel, exist = workload.parallel, workload.gradients_stay or accumulate > 1
    shards, is_sharded, stages = parallel.shard, parallel.is_sharded, parallel.pipeline
    whole = replace(workload, parallel=ParallelConfig(tensor=parallel.tensor), gathers=None)
    shape = workload.model_config.model_dump()
    if stages > 1:
        shape["num_layers"] //= stages
        fewer = type(workload.model_config)(**shape)
        whole, exist = replace(whole, model_config=fewer), False
    traced = gathered = _trace(whole, rows, exist)
    model, embedding, head = traced.model, traced.embedding, traced.head

    def own(parameter: Tensor) -> int:
        """Return the weights of the largest shard, split along the first dimension."""
        return math.ceil(parameter.shape[0] / shards) * math.prod(parameter.shape[1:])

    def own_bytes(parameters: Iterable[Tensor]) -> int:
        return sum(own(parameter) * parameter.element_size() for parameter in parameters)

    kinds, last = model.parameter_kinds(), LAST if stages > 1 else ()
    named = {name: p for name, p in model.named_parameters() if not name.startswith(last)}
    trained = [each for each in named.values() if each.requires_grad]
    optimizer = sum(
        # Muon has one momentum in fp32 for these.
        4 * own(parameter)
        if workload.optim.kind == "muon" and kinds[name] == "hidden"
        else workload.moments(own(parameter))
        for name, parameter in named.items()
        if parameter.requires_grad
    )
    gradients = own_bytes(trained)
    if is_sharded:
        gathered = _trace(replace(whole, gathers=workload.gathers), rows, False)
    logits = max(head.forward, head.backward)
    activations = traced.inputs + embedding.kept + sum(part.kept for part in gathered.blocks)
    begin = gradients if exist else 0
    if is_sharded:
        moments = list(_sharded(gathered, workload, begin * (not workload.offloads), own))
    else:
        moments = list(_micro_batch(traced, begin))
    if stages > 1:  # gradients add up, whole and in fp32, until the end of the step
        each, summed = parallel.num_stages // stages, 4 * sum(map(Tensor.numel, trained))
        in_flight = min(stages * (1 + each) / 2, accumulate)
        tokens = accumulate * rows * workload.seq_len // parallel.tensor
        # torch has room for the hidden states of all micro-batches, and for their gradients
        kept = int((in_flight - 1) * activations) + 8 * each * tokens * shape["d_model"]
        moments = [
            replace(one, gradients=one.gradients + summed, activations=one.activations + kept)
            for one in moments
        ]
    weights, kept_on_host = own_bytes(named.values()), 0
    if workload.offloads:
        kept_on_host = weights + gradients + optimizer
        weights = gradients = optimizer = 0
    else:
        step = traced.step.peak // shards
        moments.append(Moment("the optimizer's step", gradients, traced.inputs, step))
    parts = (embedding, *traced.blocks, head)
    in_micro_batch = sum(part.operations for part in parts)
    return MemoryEstimate(
        weights=weights + bytes_of(model.buffers()),
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        peak=max(moments, key=operator.attrgetter("total")),
        largest=max(part.largest for part in parts),
        operations=accumulate * in_micro_batch + traced.step.operations,
        in_optimizer=traced.step.operations,
        optimizer_flops=traced.step.flops // shards,
        host=kept_on_host,
    )


@dataclass(frozen=True)
class Part:
    """Bytes of one part of a model in a micro-batch, apart from everything outside it."""

    kept: int
    """What exists between its forward and its backward pass, with its input if that is kept."""
    forward: int
    """Peak of its forward pass, with its input and its output."""
    backward: int
    """Peak of its backward pass, with what was kept and the gradient of its output."""
    gradients: int
    """Gradients of weights that did not exist before its backward pass."""
    operations: int
    """Operations of both passes, without views."""
    largest: int
    """The largest tensor of both passes."""


@dataclass(frozen=True)
class Step:
    """The optimizer's step."""

    peak: int
    """Bytes that it needs beside the state."""
    operations: int
    flops: int = 0
    """FLOPs of its matmuls."""


@dataclass(frozen=True)
class _Traced:
    """A model without values, and its parts in the order of a micro-batch."""

    model: LanguageModel
    inputs: int
    embedding: Part
    blocks: Sequence[Part]
    head: Part
    step: Step


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


def _sharded(
    traced: _Traced, workload: Workload, gradients: int, own: Callable[[Tensor], int]
) -> Iterator[Moment]:
    """Yield the moments of a micro-batch under fully_shard. `own` returns the weights of a shard.

    Gathered are the weights outside of blocks, and two blocks, of which one is prefetched, or all
    between their passes. The gradients of a block exist whole, and in fp32 to be summed.
    """
    model: Any = traced.model
    in_stages = workload.parallel.pipeline > 1
    sums = 0 if gradients or workload.offloads or in_stages else 4
    blocks = [list(block.parameters()) for block in model.blocks]
    trained = [[weight for weight in block if weight.requires_grad] for block in blocks]
    sizes = [bytes_of(block) for block in blocks]
    layers = [bytes_of(layer.parameters()) for layer in model.layers]
    outside, embedding = bytes_of(model.parameters()) - sum(layers), 0
    if getattr(model, "unembedding", None) is not None:
        embedding = model.token_embedding.weight.nbytes
        outside -= embedding  # gathered by itself, and freed
    reshards = workload.parallel.reshard and not in_stages  # until the next forward pass
    if not any(sizes):  # a module that runs its layers in `embed`
        embedding = max(map(sum, pairwise([0, *layers]))) if reshards else sum(layers)
    first = len(blocks) - 1 if reshards else 0
    present = [  # gathered weights and copies from the host in a block's pass
        outside
        + sum(sizes[max(number - 1, 0) if reshards else 0 : number + 1])
        + 4 * workload.offloads * sum(map(own, block))
        for number, block in enumerate(blocks)
    ]
    whole = traced.head.gradients  # until the end of the backward pass
    summed = [4 * sum(weight.numel() for weight in block) + whole for block in trained]
    extras = [
        *(outside + embedding, *present, outside + sum(sizes[first:])),
        *map(operator.add, reversed(present), reversed(summed)),
        outside + whole + embedding * (not any(sizes)),
    ]
    shards = replace(
        traced,
        head=replace(traced.head, gradients=0),
        blocks=[
            replace(part, gradients=sums * sum(map(own, block)))
            for part, block in zip(traced.blocks, trained, strict=True)
        ],
    )
    for moment, extra in zip(_micro_batch(shards, gradients), extras, strict=True):
        yield replace(moment, transient=moment.transient + extra)


@lru_cache(maxsize=64)
def _trace(workload: Workload, rows: int, gradients_exist: bool) -> _Traced:
    """Trace each kind of block once, and the parts around them."""
    workload, dtype = _as_on_device(workload), workload.autocast
    precision = torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)
    mode, model = _without_values(workload)
    with mode:
        shape = (rows, workload.seq_len)
        tokens_BT, targets_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        doc_ids_BT = torch.zeros(shape, dtype=torch.int32) if workload.document_mask else None
        with torch.no_grad(), precision:
            entered_BTD = model.embed(tokens_BT)
            _, head_VD = model.head(entered_BTD)
        kinds, parameters = model.parameter_kinds(), dict(model.named_parameters())

        def traced(call: Callable[[Any], Tensor], entered_BTD: Tensor | None = entered_BTD) -> Part:
            for name, parameter in parameters.items():
                # Autograd adds both gradients of a tied weight before it touches an existing one.
                is_tied = parameter is head_VD and kinds[name] == "embedding"
                exists = gradients_exist and parameter.requires_grad and not is_tied
                parameter.grad = torch.empty_like(parameter) if exists else None
            return _trace_part(call, entered_BTD, precision)

        def loss(hidden_BTD: Tensor) -> Tensor:
            config, (normed_BTD, weight_VD) = model.config, model.head(hidden_BTD)
            limits = {"softcap": config.logit_softcap, "z_loss": config.z_loss}
            return model.ops.cross_entropy(normed_BTD, weight_VD, targets_BT, **limits)[0]

        with precision:
            shared = model.shared_by_blocks(tokens_BT, doc_ids_BT)

        def through(block: nn.Module, hidden_BTD: Tensor) -> Tensor:
            return block(hidden_BTD, doc_ids_BT, *shared)  # type: ignore[no-any-return]

        kinds_of = [_kind_of(block) for block in model.blocks]
        block_of = dict(zip(kinds_of, model.blocks, strict=True))
        part_of = {kind: traced(partial(through, block)) for kind, block in block_of.items()}
        return _Traced(
            model,
            bytes_of(
                each
                for each in tree_leaves((tokens_BT, targets_BT, doc_ids_BT, shared))
                if isinstance(each, Tensor)
            ),
            traced(lambda _: model.embed(tokens_BT), None),
            [part_of[kind] for kind in kinds_of],
            traced(loss),
            _optimizer_step(replace(workload, **_WITHOUT_ROWS), workload.parallel.tensor),
        )


_WITHOUT_ROWS: dict[str, Any] = {
    "seq_len": 1,
    "ops": Ops.plain(),
    "autocast": None,
    "document_mask": False,
    "gradients_stay": False,
    "parallel": ParallelConfig(),
    "gathers": None,
    "activations": None,
}
"""What the optimizer's step does not depend on: it is traced once for all meshes and rows."""


def _kind_of(block: nn.Module) -> tuple[object, ...]:
    """Return what two blocks that are traced alike share: modules, shapes and plain settings."""
    return tuple(
        (
            type(module),
            *((name, p.shape) for name, p in module.named_parameters(recurse=False)),
            *((name, x) for name, x in vars(module).items() if isinstance(x, PLAIN)),
        )
        for module in block.modules()
    )


def _as_on_device(workload: Workload) -> Workload:
    """Return the workload with ops that need on a CPU, without values, what those of its own do."""
    ops, on_gpu = workload.ops, workload.on_gpu
    if ops.cross_entropy is cross_entropy.chunked:
        at_once = cross_entropy.LOGITS_AT_ONCE["cuda" if on_gpu else "cpu"]
        ops = replace(ops, cross_entropy=cross_entropy.in_chunks(at_once, CHUNKS))
    if ops.cross_entropy is cross_entropy.bf16:
        ops = replace(ops, cross_entropy=cross_entropy.of_few_rows(CHUNKS))
    if on_gpu and ops.scan is scan.triton:
        ops = replace(ops, scan=scan.in_passes)
    config, has_mask = workload.model_config, workload.document_mask
    if on_gpu and ops.attention is attention.flex and workload.seq_len > attention.BLOCK_TOKENS:
        ops, has_mask = replace(ops, attention=attention.fused), False  # its kernel builds no mask
        config = config.model_copy(update={"window": None})
    # the tensors of bfloat16 are as large, and a CPU has all of its operations
    dtype = torch.bfloat16 if workload.autocast is torch.float16 else workload.autocast
    return replace(workload, ops=ops, autocast=dtype, model_config=config, document_mask=has_mask)


class _Shapes(Split):
    """Gives tensors the shapes that they have on each of several ranks."""

    def gathered(self, own_BSD: Tensor, dim: int = 1) -> Tensor:
        """Return as many tokens as all ranks have."""
        return torch.cat([own_BSD] * self.size, dim)

    def reduced(self, partial_BTD: Tensor) -> Tensor:
        """Return as many tokens as one rank has."""
        return partial_BTD.chunk(self.size, dim=1)[0].clone()


@lru_cache(maxsize=64)
def _without_values(workload: Workload) -> tuple[FakeTensorMode, LanguageModel]:
    """Return a mode in which all tensors are without storage, and the model made in it."""
    with FakeTensorMode() as mode:
        model = workload.model_class(workload.model_config, workload.ops)
        model = with_adapters(model, workload.lora)
        if workload.parallel.tensor > 1:
            split = _Shapes(None, 0, workload.parallel.tensor)
            model.share_layers(split, seq_len=workload.seq_len)
            for name, cut in model.tensor_cuts().items():
                whole, (owner, _, last) = model.get_parameter(name), name.rpartition(".")
                part = nn.Parameter(cut.empty(whole, split.size), whole.requires_grad)
                setattr(model.get_submodule(owner), last, part)
        if workload.gathers is not None:
            for module in model.blocks.modules():  # `to` cannot exchange tensors without values
                for name, own in list(module.named_parameters(recurse=False)):
                    narrow = nn.Parameter(own.detach().to(workload.gathers), own.requires_grad)
                    setattr(module, name, narrow)
        if workload.activations is not None:
            workload.activations(model)
    return mode, model


def _trace_part(
    call: Callable[[Tensor | None], Tensor], entered_BTD: Tensor | None, precision: torch.autocast
) -> Part:
    """Run a part forward and backward, and return its bytes.

    The part is called with a tensor like `entered_BTD`, or None. What it returns is the input of
    the next part, which counts it.
    """
    leaf = None
    if entered_BTD is not None:
        leaf = entered_BTD.new_zeros((), requires_grad=True).expand(entered_BTD.shape)
    with Live() as live:
        given = None if leaf is None else leaf.clone()  # which nothing but the part holds
        with precision:
            left = call(given)
        del given
        if left.requires_grad:  # not after an embedding that is frozen
            # Its gradient has separate memory.
            left.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        end = left.sum()
        del left
        kept, forward = live.now, live.peak
        live.restart_peak()
        if end.requires_grad:
            end.backward()  # type: ignore[no-untyped-call]
        del end
    return Part(kept, forward, live.peak, live.now, live.operations, live.largest)


@lru_cache(maxsize=64)
def _optimizer_step(workload: Workload, num_ranks: int) -> Step:
    """Return the optimizer's step of one of `num_ranks` that share layers, for any rows.

    AdamW's need is stated. Any other takes two steps, of which the first creates the state, and
    asks for whole parameters. One that reads values, as `.item()` does, counts as AdamW.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    mode, model = _without_values(workload)
    trained, copies = _trained(model), workload.adamw_copies
    stated = Step(
        4 * copies * max((each.numel() for each in trained), default=0) // num_ranks,
        PER_PARAMETER * len(trained) if copies else 1,
    )
    if workload.optim.kind == "adamw":
        return stated
    with mode, Live() as live:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        parts = OptimizerParts(_Nothing, workload.newton_schulz)
        try:
            optimizers = OPTIMIZERS.get(workload.optim.kind)(model, workload.optim, parts)
            for _ in range(2):
                state, live.operations = live.now, 0
                live.restart_peak()
                with FlopCounterMode(display=False) as counter:
                    for optimizer in optimizers:
                        optimizer.step()
        except RuntimeError:
            return stated
    return Step(
        max(stated.peak, (live.peak - state) // num_ranks),
        live.operations,
        counter.get_total_flops() // num_ranks,
    )


class _Nothing(LightOptimizer):
    """Stands for AdamW, whose step cannot run without values."""

    def __init__(self, groups: list[ParameterGroup], keywords: AdamWSettings) -> None:
        super().__init__(groups, dict(keywords))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the total bytes of tensors created inside the context, and the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self.operations = 0
        """Those that computed something: not views."""
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(part) for part in tensors_in((args, kwargs))}
        made = [part for part in tensors_in(result) if storage_id(part) not in given]
        self.operations += bool(made) or func._schema.is_mutable
        for part in made:
            self._add(part.untyped_storage())
        return result

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def on_free(_: object) -> None:
            self._seen.pop(key, None)
            self.now -= size

        self._seen[key] = weakref.ref(storage, on_free)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages. Each storage counts once."""
    return sum({storage_id(each): each.untyped_storage().nbytes() for each in tensors}.values())


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested `values`. For a wrapper subclass, the tensors inside it."""
    for value in tree_leaves(values):
        if is_traceable_wrapper_subclass(value):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _trained(model: LanguageModel) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def free_bytes(machine: Machine, device: str, local_world_size: int) -> int | None:
    """Return what is available to one rank now, without swapping. None without such a device."""
    if device.startswith("cuda"):
        if machine.is_here and torch.cuda.is_available():
            return torch.cuda.mem_get_info(device)[0]
        return int(machine.gpus[0].memory_gib * GIB) if machine.gpus else None
    own = psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available + own, int(machine.memory_gib * GIB))
    return free // local_world_size


def memory_bytes(machine: Machine, device: str, local_world_size: int) -> int:
    """Return the memory that one rank may use.

    This is the free memory of a GPU, or on a CPU the machine's memory divided by its processes.
    """
    free = free_bytes(machine, device, local_world_size) if device.startswith("cuda") else None
    return int(machine.memory_gib / local_world_size * GIB) if free is None else free
