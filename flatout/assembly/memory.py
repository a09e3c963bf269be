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
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from flatout.assembly.prediction import (
    CUDA_CONTEXT,
    CUDA_RESERVED,
    GIB,
    MemoryEstimate,
    MemoryPrediction,
    Moment,
    PastRun,
    predict_memory,
)
from flatout.assembly.recipe import divisors
from flatout.config.registry import OPTIMIZERS
from flatout.config.schema import RunConfig
from flatout.config.sections import LoraConfig, OptimConfig
from flatout.display import memory_size
from flatout.distributed.mesh import Mesh
from flatout.distributed.tensor import Split
from flatout.errors import FlatoutError, HardwareError
from flatout.hardware.machine import Machine, machine_rows
from flatout.models.language_model import LanguageModel, LanguageModelConfig
from flatout.models.lora import with_adapters
from flatout.ops import Ops
from flatout.optim.groups import (
    AdamWSettings,
    LightOptimizer,
    OptimizerParts,
    ParameterGroup,
)

USED_MEMORY = 0.8
"""Share of the memory that a micro-batch may fill, by estimate."""
PER_PARAMETER = 4
"""Assumed operations of the optimizer's step per trained tensor."""
FIRST_STEP = 64
"""The second number of rows that is tried: with few, the optimizer's step may need the most."""
MOST_ROWS = 2**20
"""Upper bound of the search for the most rows."""
PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of the settings by which blocks differ."""
COUNTS = tuple(2**power for power in range(11))
"""Numbers of GPUs that are suggested."""


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
    autocast: torch.dtype | None
    """Dtype of the matmuls if it differs from the weights'."""
    moments: Callable[[int], int]
    """Number of weights of a tensor -> bytes that AdamW keeps for it."""
    num_shards: int
    """Processes over which weights, gradients and optimizer state are sharded."""
    whole_gradients: bool
    """Whether each process keeps unsharded gradients of sharded weights between micro-batches."""
    gathers: torch.dtype | None
    """Dtype in which sharded blocks are gathered if it differs from the weights'."""
    transforms: tuple[Callable[[LanguageModel, Mesh | None], LanguageModel], ...]
    """Transforms that change what the model keeps: (model, mesh) -> model."""
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
    is_sharded: bool = False
    """Whether fully_shard holds the weights: with several shards it does."""
    tensor: int = 1
    """Processes that share every layer."""
    reshard: bool = True
    """Whether gathered blocks are freed between forward and backward."""
    offloads: bool = False
    """Whether shards are in host memory."""


def estimate(workload: Workload, rows: int, accumulate: int = 1) -> MemoryEstimate:
    """Return the memory of a training step of `accumulate` micro-batches of `rows` sequences."""
    shards, exist = workload.num_shards, workload.gradients_stay or accumulate > 1
    is_sharded = workload.is_sharded or shards > 1
    whole = replace(workload, num_shards=1, whole_gradients=False, gathers=None)
    traced = gathered = _trace(whole, rows, exist)
    model, embedding, head = traced.model, traced.embedding, traced.head

    def own(parameter: Tensor) -> int:
        """Return the weights of the largest shard, split along the first dimension."""
        return math.ceil(parameter.shape[0] / shards) * math.prod(parameter.shape[1:])

    def own_bytes(parameters: Iterable[Tensor]) -> int:
        return sum(own(parameter) * parameter.element_size() for parameter in parameters)

    trained, kinds = _trained(model), model.parameter_kinds()
    optimizer = sum(
        # Muon has one momentum in fp32 for these.
        4 * own(parameter)
        if workload.optim.kind == "muon" and kinds[name] == "hidden"
        else workload.moments(own(parameter))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    gradients = bytes_of(trained) if workload.whole_gradients else own_bytes(trained)
    if is_sharded:
        narrow = replace(whole, gathers=workload.gathers)
        gathered = _trace(narrow, rows, workload.whole_gradients)
    logits = max(head.forward, head.backward)
    in_block = max((part.backward - part.kept for part in gathered.blocks), default=0)
    workspace = max(in_block - logits, 0)
    activations = traced.inputs + embedding.kept + sum(part.kept for part in gathered.blocks)
    begin = gradients if exist else 0
    if is_sharded:
        moments = list(_sharded(gathered, workload, begin * (not workload.offloads), own))
        workspace = max(moment.transient for moment in moments) - logits
    else:
        moments = list(_micro_batch(traced, begin))
    weights, kept_on_host = own_bytes(model.parameters()), 0
    if workload.offloads:
        kept_on_host = weights + gradients + optimizer
        weights = gradients = optimizer = 0
    else:
        step = traced.step // shards
        moments.append(Moment("the optimizer's step", gradients, traced.inputs, step))
    parts = (embedding, *traced.blocks, head)
    in_micro_batch = sum(part.operations for part in parts)
    return MemoryEstimate(
        weights=weights + bytes_of(model.buffers()),
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        workspace=workspace,
        peak=max(moments, key=attrgetter("total")),
        largest=max(part.largest for part in parts),
        operations=accumulate * in_micro_batch + PER_PARAMETER * len(trained),
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
class _Traced:
    """A model without values, and its parts in the order of a micro-batch."""

    model: LanguageModel
    inputs: int
    embedding: Part
    blocks: Sequence[Part]
    head: Part
    step: int
    """What the optimizer's step needs beside its state."""


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
    sums = 0 if gradients or workload.whole_gradients or workload.offloads else 4
    if workload.whole_gradients:
        gradients = bytes_of(_trained(model))
    blocks = [list(block.parameters()) for block in model.blocks]
    sizes = [bytes_of(block) for block in blocks]
    embedding = model.token_embedding.weight.nbytes
    outside = bytes_of(model.parameters()) - sum(sizes)
    if getattr(model, "unembedding", None) is not None:
        outside -= embedding  # gathered by itself, and freed

    def present(number: int) -> int:
        """Return the bytes of gathered weights and of copies from the host in a block's pass."""
        found = outside + sum(sizes[max(number - 1, 0) if workload.reshard else 0 : number + 1])
        return found + 4 * workload.offloads * sum(map(own, blocks[number]))

    kept = traced.inputs
    yield Moment("the embedding", gradients, kept, traced.embedding.forward + outside + embedding)
    kept += traced.embedding.kept
    for number, part in enumerate(traced.blocks):
        transient = part.forward + present(number)
        yield Moment("a block's forward pass", gradients, kept, transient)
        kept += part.kept
    last, head = len(blocks) - 1, traced.head
    gathered = outside + sum(sizes[0 if not workload.reshard else last :])
    yield Moment("the loss", gradients, kept, max(head.forward, head.backward) + gathered)
    whole = head.gradients  # until the end of the backward pass
    for number, part in reversed(list(enumerate(traced.blocks))):
        weights = [weight for weight in blocks[number] if weight.requires_grad]
        transient = part.backward - min(part.kept, part.backward) + present(number) + whole
        transient += 4 * sum(weight.numel() for weight in weights)
        yield Moment("a block's backward pass", gradients, kept, transient)
        kept -= part.kept
        gradients += sums * sum(map(own, weights))
    kept -= traced.embedding.kept
    transient = traced.embedding.backward + outside + whole
    yield Moment("the embedding's gradient", gradients, kept, transient)


@lru_cache(maxsize=64)
def _trace(workload: Workload, rows: int, gradients_exist: bool) -> _Traced:
    """Trace each kind of block once, and the parts around them."""
    dtype = workload.autocast
    precision = torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)
    mode, model = _without_values(workload)
    with mode:
        largest = max((each.numel() for each in _trained(model)), default=0)
        step = 4 * workload.adamw_copies * largest  # AdamW's need is stated
        if workload.optim.kind != "adamw":
            alone = _optimizer_peak(replace(workload, tensor=1))  # it asks for whole parameters
            step = max(step, alone // workload.tensor)
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
            step,
        )


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
        mode.stands_for = "cuda" if workload.on_gpu else "cpu"  # type: ignore[attr-defined]
        model = workload.model_class(workload.model_config, workload.ops)
        model = with_adapters(model, workload.lora)
        if workload.tensor > 1:
            split = _Shapes(None, 0, workload.tensor)
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
        for transform in workload.transforms:
            model = transform(model, None)
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
def _optimizer_peak(workload: Workload) -> int:
    """Return the most that an optimizer other than AdamW needs beside its state, for any rows.

    It takes two steps, of which the first creates the state. An optimizer that reads values, as
    `.item()` does, counts as one that needs nothing.
    """
    mode, model = _without_values(workload)
    with mode, Live() as live:
        for parameter in _trained(model):
            parameter.grad = torch.empty_like(parameter)
        parts = OptimizerParts(_Nothing, workload.newton_schulz)
        try:
            optimizers = OPTIMIZERS.get(workload.optim.kind)(model, workload.optim, parts)
            for _ in range(2):
                state = live.now
                live.restart_peak()
                for optimizer in optimizers:
                    optimizer.step()
        except RuntimeError:
            return 0
    return int(live.peak - state)


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
        given = {storage_id(part) for part in parts_of((args, kwargs))}
        made = [part for part in parts_of(result) if storage_id(part) not in given]
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


def parts_of(values: Any) -> Iterator[Tensor]:
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


@dataclass(frozen=True)
class Capacity:
    """The memory of one rank, in bytes."""

    whole: int
    """All memory that it could ever have: of the GPU, or on a CPU its share, with swap."""
    free: int
    """What is available now, without swapping."""
    name: str
    """What has it: `GPU` or `machine`."""


def capacity_of(machine: Machine, device: str, local_world_size: int) -> Capacity | None:
    """Return the memory of one rank on `device`. None when the machine has no such device."""
    if device.startswith("cuda"):
        if machine.is_here and torch.cuda.is_available():
            free, whole = torch.cuda.mem_get_info(device)
            return Capacity(whole, free, "GPU")
        if not machine.gpus:
            return None
        whole = int(machine.gpus[0].memory_gib * GIB)
        return Capacity(whole, whole, "GPU")
    memory = int(machine.memory_gib * GIB)
    own = psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available + own, memory)
    whole = memory + psutil.swap_memory().total
    return Capacity(whole // local_world_size, free // local_world_size, "machine")


def memory_bytes(machine: Machine, device: str, local_world_size: int) -> int:
    """Return the memory that one rank may use.

    This is the free memory of a GPU, or on a CPU the machine's memory divided by its processes.
    """
    capacity = capacity_of(machine, device, local_world_size)
    if capacity is None or capacity.name != "GPU":
        return int(machine.memory_gib / local_world_size * GIB)
    return capacity.free


def require_fitting(
    config: RunConfig, workload: Workload, memory: MemoryPrediction, capacity: Capacity
) -> str | None:
    """Return a warning when a micro-batch fits only by swapping or by luck, else None.

    Raises: HardwareError with the largest micro-batch that fits, when this one certainly does not.
    """
    rows, accumulate = int(config.batch.rows_per_device), config.batch.accumulate or 1
    # A compiled model needs less than its estimate, by an unknown amount.
    expected = memory.least if memory.error is None else memory.total
    impossible = memory.least > capacity.whole
    if not impossible and expected <= capacity.free:
        return None
    limit = capacity.whole if impossible else capacity.free
    need = f"batch.rows_per_device={rows} needs about {memory_size(memory.total)}"
    fewer = smaller_batch(workload, rows * accumulate, int(USED_MEMORY * limit), rows - 1)
    fix = f"Set {rows_advice(fewer, rows * accumulate)}" if fewer else ""
    if not fix and (impossible or memory.on_gpu):
        machine = smallest_machine(workload)
        larger = f", or use a larger machine, such as {machine} (`flatout plan` compares)"
        fix = "Not even one sequence fits: shorten data.seq_len or choose a smaller model"
        fix += f"{larger if machine else ''}."
    if impossible:
        raise HardwareError(
            f"{need}, but this {capacity.name} has {memory_size(capacity.whole)}.", fix=fix
        )
    risk = (
        "it may run out of memory"
        if memory.on_gpu
        else "it will be much slower if the system swaps"
    )
    free = memory_size(capacity.free)
    return f"{need}, but {free} of this {capacity.name} are free: {risk}. {fix}".rstrip()


def rows_advice(rows: int, rows_per_rank: int) -> str:
    """Return the settings for micro-batches of `rows`, as the end of a sentence."""
    return (
        f"batch.rows_per_device={rows} batch.accumulate={rows_per_rank // rows}: "
        "the tokens per step stay the same."
    )


def smaller_batch(
    workload: Workload, rows_per_rank: int, available: int, at_most: int
) -> int | None:
    """Return the most rows, up to `at_most`, that fit and divide a rank's step, or None.

    Rows that divide the step keep its number of tokens.
    """
    return next(divisors(rows_per_rank, min(most_rows(workload, available), at_most)), None)


def most_rows(workload: Workload, available: int) -> int:
    """Return the most rows with which a step of two micro-batches needs at most `available` bytes.

    0 when not even one row fits.
    """

    def need(rows: int) -> int:
        return estimate(workload, rows, accumulate=2).total

    if need(1) > available:
        return 0
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


def smallest_machine(workload: Workload) -> str | None:
    """Return the smallest known machine that can train with one row per device, as `8x h100-sxm`.

    The number of GPUs comes first, then their memory. More than one GPU means a sharded model.
    """
    rows = sorted(machine_rows(), key=lambda row: row.memory_gb.value)
    for count in COUNTS:
        sharded = replace(workload, num_shards=count, on_gpu=True)
        need = estimate(sharded, 1, 2).total * CUDA_RESERVED + CUDA_CONTEXT  # rows that accumulate
        for row in rows:
            if need <= row.memory_gb.value * 1e9:
                how = f" with parallel.shard={count}" if count > 1 else ""
                return f"{count}x {row.name}{how}"
    return None


def trace_memory(
    this: PastRun,
    workload: Workload,
    *,
    context: int = 0,
) -> tuple[MemoryPrediction | None, str | None]:
    """Return the peak memory of one rank of `this`, or why it cannot be predicted."""
    try:
        found = estimate(workload, this.rows_per_device, this.accumulate)
    except FlatoutError:
        raise
    except Exception as error:  # a custom model may need values, which the trace does not have
        return None, f"{type(error).__name__}: {error}"
    return predict_memory(this, found, on_gpu=workload.on_gpu, context=context), None


def recompute_blocks(
    model: LanguageModel, _mesh: Mesh | None = None, **options: Any
) -> LanguageModel:
    """Wrap each layer in torch's `checkpoint` with these options. Parameter names do not change."""

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        # dynamo traces a function that calls `checkpoint`, and no partial of it
        def call(*inputs: Any, **named: Any) -> Any:
            return checkpoint(forward, *inputs, use_reentrant=False, **options, **named)

        return call

    for layer in model.layers:
        layer.forward = recomputed(layer.forward)
    return model
