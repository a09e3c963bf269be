"""Resolve a configuration: fill in every open value, once, before a run is built."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatout.assembly.compiled_code import compile_cost
from flatout.assembly.memory import USED_MEMORY, Workload, estimate, memory_bytes, most_rows
from flatout.assembly.prediction import CUDA_CONTEXT, CUDA_RESERVED, gains_here
from flatout.assembly.preflight import check_names, resolve_batch
from flatout.assembly.recipe import MicroBatchPlan, Recipe
from flatout.assembly.selection import (
    Decision,
    assemble,
    memory_savers,
    parse_request,
    recipe_of,
    select,
)
from flatout.config.registry import MODELS
from flatout.config.schema import RunConfig
from flatout.config.sections import TrainConfig
from flatout.data.load.batches import BatchPlan
from flatout.data.store.mix import AnyDataset, members_of
from flatout.display import memory_size
from flatout.distributed.context import Context
from flatout.distributed.launch import replicas
from flatout.distributed.tensor import Split
from flatout.errors import ConfigError, FlatoutError, HardwareError
from flatout.hardware.machine import ASSUMED_MFU, Machine
from flatout.hardware.roofline import peak_tflops
from flatout.models.families.source import find_model, is_foreign
from flatout.models.language_model import Flops, LanguageModel, LanguageModelConfig, model_of
from flatout.ops import Ops, scan
from flatout.progress import counted

known_peak = functools.cache(peak_tflops)
"""Like `peak_tflops`, but measures at most once per process."""
FREE_OF_WEIGHTS = (
    "chunk_size",
    "dropout",
    "initialisation",
    "max_seq_len",
    "memory",
    "rotary_base",
    "window",
)
"""Model keys that may differ from those the weights were trained with, as long as shapes agree.

The new run may use longer sequences, more dropout, or a different initialisation for fresh weights.
With any other key changed, the same weights would compute a different function.
"""
WITHOUT_IT = "without it"
"""How the reason for a speedup begins that was added because nothing fits without it."""
EVALUATIONS, MIN_BETWEEN_EVALUATIONS = 20, 10
"""Evaluations of a run that states no interval, and the fewest steps between two."""
EVALUATION_SHARE, MIN_SEQUENCES = 0.05, 32
"""Most of the run's work that they take, and the fewest sequences that one of them scores."""
FREE_OF_BASE = (*FREE_OF_WEIGHTS, "z_loss")
"""Keys that may differ from a base model, whose files do not describe training."""


def resolve(
    config: RunConfig,
    *,
    machine: Machine,
    dataset: AnyDataset | None,
    world_size: int,
    local_world_size: int | None = None,
    cache: Path | None = None,
) -> tuple[RunConfig, list[Decision]]:
    """Return the fully resolved configuration, and a decision for every speedup.

    `config.train.device` must be resolved already. Without a dataset, which only planning allows,
    a length in epochs stays open. `local_world_size` is the number of processes on
    this machine. None means all of them. `cache` has the gains that `bench` measured on this
    hardware. None for no gains.
    Raises: ConfigError when sizes contradict each other.
    """
    config = resolve_batch(_resolve_model(config, dataset), world_size)
    requested, device = config.train, config.train.device
    config = config.with_values(
        {
            "parallel.replicate": replicas(config.parallel, world_size),
            "train.steps": steps_stated(config, requested, dataset),
        }
    )
    check_names(config)
    _check_divides(config)
    dtype: str = machine.gpu_dtype
    if device == "cpu":
        narrow = machine.cpu_multiplies_bf16 and requested.precision != "fp32"
        dtype = "bf16" if narrow else "fp32"
    peak = known_peak(machine, device, dtype) if device == "cpu" or machine.gpus else None
    minutes = expected_minutes(config, world_size * peak.tflops * ASSUMED_MFU) if peak else None
    gains = gains_here(machine, device, cache, functools.partial(flops_per_token, config))
    decisions = select(
        config,
        machine,
        device=device,
        minutes=minutes,
        measured=gains,
        compile_cost=(
            compile_cost(config, minutes) if device == "cpu" and cache is not None else 1.0
        ),
    )
    available = memory_bytes(machine, device, local_world_size or world_size)
    decisions = with_checkpointing(config, decisions, available, world_size)
    on = [decision.name for decision in decisions if decision.on]
    recipe = assemble(on)
    chooser = recipe.filled_by.get("micro_batch")
    if config.batch.rows_per_device == "auto":
        rows_per_rank = (config.batch.tokens_per_step or 0) // (
            config.data.seq_len * world_size // config.parallel.per_row
        )
        usable = int(USED_MEMORY * available)
        plan = micro_batch_plan(workload_of(config, recipe), rows_per_rank, device, usable)
        rows = recipe.micro_batch(plan)
        config = config.with_values(
            {"batch.rows_per_device": rows, "batch.accumulate": rows_per_rank // rows}
        )
        # The config now states the rows: the speedup that chose them has no further effect.
        on = [name for name in on if name != chooser]
    config = config.with_values(
        {
            "train.steps": steps_stated(config, requested, dataset, recipe),
            "train.precision": recipe.precision.name,
            "speedups": on or "none",
        }
    )
    epochs = requested.epochs or (0 if requested.steps or requested.tokens else 1)
    return with_evaluations(config, dataset, epochs), decisions


def with_checkpointing(
    config: RunConfig, decisions: list[Decision], available: int, world_size: int
) -> list[Decision]:
    """Return the decisions, with activation checkpointing on if nothing fits a GPU without it.

    Only `auto` adds it: the selective one if that is enough, or else the full one. What must fit is
    the stated micro-batch, or one row. `available` are the bytes of one rank.
    """
    on, rows = [each.name for each in decisions if each.on], config.batch.rows_per_device
    if not may_checkpoint(config, on):
        return decisions
    if rows == "auto":
        rows, accumulate, usable = 1, 2, int(USED_MEMORY * available)
    else:
        per_rank = (config.batch.tokens_per_step or 0) // (
            config.data.seq_len * world_size // config.parallel.per_row
        )
        accumulate, usable = per_rank // rows, int((available - CUDA_CONTEXT) / CUDA_RESERVED)

    def need(names: list[str]) -> int:
        return estimate(workload_of(config, assemble(names)), rows, accumulate).total

    try:
        if (without := need(on)) <= usable:
            return decisions
        savers = memory_savers(config.train.device)
        is_enough = need([*on, savers[-1]]) <= usable
        name = next((name for name in savers if is_enough and need([*on, name]) <= usable), None)
    except FlatoutError:
        raise
    except Exception:  # a custom model may need values, which the trace does not have
        return decisions
    if name is None:
        return decisions
    reason = (
        f"{WITHOUT_IT}, {counted(rows, 'row')} of {config.data.seq_len:,} tokens would need about "
        f"{memory_size(without * CUDA_RESERVED + CUDA_CONTEXT)}, and "
        f"{memory_size(available)} are there"
    )
    return [
        replace(each, on=True, reason=reason) if each.name == name else each for each in decisions
    ]


def checkpointing_notes(decisions: Sequence[Decision]) -> list[str]:
    """Return a sentence about activation checkpointing if `with_checkpointing` has added it."""
    added = (each for each in decisions if each.on and each.reason.startswith(WITHOUT_IT))
    return [f"`auto` turns on {each.name}: {each.reason}." for each in added]


def may_checkpoint(config: RunConfig, on: Sequence[str]) -> bool:
    """Return whether `auto` may add activation checkpointing to the speedups that are on."""
    request = parse_request(config.speedups)
    return (
        request.auto
        and config.train.device.startswith("cuda")
        and "activations" not in assemble(on).filled_by
        and not {*request.named, *request.dropped} & {*memory_savers(config.train.device)}
    )


def micro_batch_plan(
    workload: Workload, rows_per_rank: int, device: str, available: int
) -> MicroBatchPlan:
    """Return what the rows of a micro-batch are chosen from, given the bytes that it may fill.

    Its `fits` raises ConfigError when the memory of a custom model cannot be predicted.
    """

    def fits(rows: int) -> bool:
        try:
            return estimate(workload, rows, rows_per_rank // rows).total <= available
        except FlatoutError:
            raise
        except Exception as error:  # a custom model may need values, which the trace does not have
            raise ConfigError(
                "The memory of a micro-batch cannot be predicted, so that its rows cannot be "
                f"chosen: {type(error).__name__}: {error}",
                fix="If that is an error of the model, repair it. If the model needs values, set "
                f"batch.rows_per_device to a number, such as {rows}.",
            ) from error

    def most() -> int:
        fitting = most_rows(workload, available)
        if fitting:
            return fitting
        least = estimate(workload, 1, accumulate=2).total
        raise HardwareError(
            f"One sequence of {workload.seq_len} tokens needs about "
            f"{memory_size(least)}, but {memory_size(available)} are available.",
            fix="Shorten data.seq_len, choose a smaller model, or shard it with parallel.shard.",
        )

    return MicroBatchPlan(workload.seq_len, rows_per_rank, device, fits, most)


def steps_stated(
    config: RunConfig,
    requested: TrainConfig,
    dataset: AnyDataset | None,
    recipe: Recipe | None = None,
) -> int | None:
    """Return the length that `requested` states, in optimizer steps of a run with resolved batches.

    If the recipe has its own batching, steps contain padding, and thus fewer tokens.
    Returns: None for a length in epochs without a dataset.
    """
    if requested.steps is not None:
        return requested.steps
    epochs, seq_len = requested.epochs or 1.0, config.data.seq_len
    per_step = config.batch.tokens_per_step or 1
    if dataset is None:
        return math.ceil((requested.tokens or 0) / per_step) or None
    if recipe is None or "batching" not in recipe.filled_by:
        tokens = requested.tokens or epochs * epoch_tokens(dataset, seq_len)
        return max(math.ceil(tokens / per_step), 1)
    plan = BatchPlan(
        seq_len,
        per_step // seq_len,
        1,
        dp_rank=0,
        dp_size=1,
        seed=0,
        document_mask=False,
        prefetch=0,
        device="cpu",
    )
    steps = recipe.batching(dataset.split("train"), plan, None)
    if requested.tokens:
        epochs = requested.tokens / steps.tokens_per_epoch
    return max(math.ceil(epochs * steps.steps_per_epoch), 1)


def with_evaluations(
    config: RunConfig, dataset: AnyDataset | None, epochs: float | None = None
) -> RunConfig:
    """Return a resolved configuration with the steps between evaluations, and what each scores.

    If the configuration states neither, they are an epoch of a run of at least two `epochs`, and
    1/EVALUATIONS of any other. Each scores as much as keeps them within EVALUATION_SHARE of the
    run. Without a dataset, which defines the length of an epoch, the configuration stays as it is.
    """
    train, steps = config.train, config.train.steps
    if dataset is None or steps is None:
        return config
    per_epoch = train.eval_every_epochs
    if per_epoch is None and train.eval_every is None and epochs and epochs >= 2:
        per_epoch = 1.0
    every, tokens = train.eval_every, train.eval_tokens
    if per_epoch is not None:
        every = steps_stated(config, TrainConfig(epochs=per_epoch), dataset, recipe_of(config))
    elif every is None:
        every = max(math.ceil(steps / EVALUATIONS), MIN_BETWEEN_EVALUATIONS)
    if tokens is None:
        tokens = "all"
        if every and train.eval_every is None and train.eval_every_epochs is None:
            # scoring a token takes a third of the work of training on it
            trained = 3 * EVALUATION_SHARE * every * (config.batch.tokens_per_step or 0)
            sequences = max(int(trained) // config.data.seq_len, MIN_SEQUENCES)
            whole = sum(member.dataset.split("val").num_tokens for member in members_of(dataset))
            if sequences * config.data.seq_len < whole:
                tokens = sequences * config.data.seq_len
    return config.with_values({"train.eval_every": every, "train.eval_tokens": tokens})


def expected_minutes(config: RunConfig, tflops: float) -> float | None:
    """Return the minutes of a run's matmuls, or None if its length depends on the data.

    Units:  tflops is the rate of all processes together.
    """
    config = resolve_batch(config, 1) if config.batch.tokens_per_step is None else config
    tokens = (
        config.train.tokens
        if config.train.steps is None
        else config.train.steps * (config.batch.tokens_per_step or 0)
    )
    if tokens is None:
        return None
    return flops_per_token(config) * tokens / (tflops * 1e12) / 60


def flops_per_token(config: RunConfig) -> float:
    """Return the FLOPs per token of the model, forward and backward."""
    model_class, model_config = model_of(config, vocab_size=config.model.vocab_size or 1)
    return float(_count_flops(model_class, model_config, config.data.seq_len).causal_exact)


@functools.lru_cache(maxsize=16)
def _count_flops(
    model_class: type[LanguageModel], model_config: LanguageModelConfig, seq_len: int
) -> Flops:
    """Return the FLOPs per token: one recipe is resolved many times, with other speedups."""
    return model_class.count_flops(model_config, seq_len)


def workload_of(config: RunConfig, recipe: Recipe | None = None) -> Workload:
    """Return the workload of a resolved configuration, from which its memory is estimated.

    `recipe` replaces its speedups.
    """
    model_class, model_config = model_of(config)
    recipe = recipe or recipe_of(config)
    ops = recipe.ops()
    if ops.scan is scan.reference:
        # Stepping through 16,384 tokens takes minutes. The chunked scan keeps only 2% less memory.
        ops = replace(ops, scan=scan.chunked)
    return Workload(
        model_class,
        model_config,
        config.data.seq_len // config.parallel.context,
        ops,
        recipe.precision.dtype(),
        moments=recipe.moments,
        num_shards=config.parallel.shard,
        tensor=config.parallel.tensor,
        whole_gradients="grad_sync" in recipe.filled_by,
        gathers=recipe.gather_dtype,
        transforms=tuple(filter(None, (recipe.low_precision, recipe.activations))),
        document_mask=config.data.document_mask,
        gradients_stay="zero_grad" in recipe.filled_by
        or config.parallel.replicate not in ("auto", 1),
        optim=config.optim,
        lora=config.lora,
        newton_schulz=recipe.newton_schulz,
        adamw_copies=0 if "optimizer" in recipe.filled_by else 3,
        on_gpu=config.train.device.startswith("cuda"),
        is_sharded=config.parallel.is_sharded,
        reshard=config.parallel.reshard,
        offloads=config.parallel.offload == "cpu" and config.train.device.startswith("cuda"),
    )


def _resolve_model(config: RunConfig, dataset: AnyDataset | None) -> RunConfig:
    """Return the configuration with the vocabulary size and the model's defaults filled in."""
    config = with_base_shape(config, dataset)
    vocab_size = config.model.vocab_size or (dataset.vocab_size if dataset else None)
    if vocab_size is None:
        raise ConfigError(
            "The vocabulary size is not known: neither model.vocab_size nor a dataset sets it"
            + (f", and {config.data.path} is not a dataset yet." if config.data.path else "."),
            fix="Set model.vocab_size, such as 50304 for GPT-2's tokenizer, or data.path to a "
            "prepared dataset.",
        )
    if dataset is not None and vocab_size < dataset.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the vocabulary of "
            f"{members_of(dataset)[0].dataset.path}, {dataset.vocab_size}.",
            fix="Remove model.vocab_size, or prepare the data with the model's own tokenizer.",
        )
    _, model_config = model_of(config, vocab_size=vocab_size)
    return config.with_values(
        {f"model.{key}": value for key, value in model_config.model_dump(mode="json").items()}
    )


def _check_divides(config: RunConfig) -> None:
    """Check that processes can share rows and layers as `parallel` requires.

    Raises: ConfigError, as the model's `share_rows` and `share_layers`.
    """
    parallel, data = config.parallel, config.data
    if parallel.per_row == 1:
        return
    if parallel.tensor > 1 and config.lora.rank:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} does not support lora.rank={config.lora.rank}.",
            fix="Remove one of them.",
        )
    model_class, model_config = model_of(config)
    model = model_class.on_meta(model_config, Ops.plain())
    if parallel.context > 1:
        context = Context(None, 0, parallel.context, bool(model.divides_rows))
        model.share_rows(context, seq_len=data.seq_len, has_documents=data.document_mask)
    if parallel.tensor > 1:
        model.share_layers(Split(None, 0, parallel.tensor), seq_len=data.seq_len)


def epoch_tokens(dataset: AnyDataset, seq_len: int) -> int:
    """Return the tokens in one pass over the training split or mix, in whole sequences."""
    return dataset.split("train").num_sequences(seq_len) * seq_len


def with_base_shape(config: RunConfig, dataset: AnyDataset | None) -> RunConfig:
    """Return the configuration with the model keys of the base model that train.init_from names.

    Keys that the configuration states must agree with them, but a larger embedding than the
    dataset's vocabulary is accepted if model.vocab_size states it. A run or checkpoint of flatout
    changes nothing here.

    Raises: ConfigError naming both values of a key that differs, or both vocabularies;
            CheckpointError when the model's config.json cannot be read.
    """
    init_from = config.train.init_from
    if init_from is None or not is_foreign(init_from):
        return config
    stated = {key: value for key, value in config.model.own().items() if value is not None}
    if config.model.vocab_size is not None:
        stated["vocab_size"] = config.model.vocab_size
    own = dict(find_model(init_from, whole=False, for_run=True).keys)
    if not own:  # the tensors of this run's own model
        return config
    kind, rows = own.pop("kind"), own["vocab_size"]
    if config.model.kind != kind and (stated or config.model.kind != "transformer"):
        raise _different({"kind": (config.model.kind, kind)}, init_from)
    if dataset is not None and rows != dataset.vocab_size:
        known, origin = dataset.vocab_size, members_of(dataset)[0].dataset.path
        sizes = f"The base model {init_from} has a vocabulary of {rows}, and the tokenizer"
        if rows < known:
            raise ConfigError(
                f"{sizes} of {origin} has {known}.",
                fix="Prepare the data with the model's own tokenizer, `--tokenizer ORG/NAME` or "
                "its tokenizer.json.",
            )
        if config.model.vocab_size is None:
            raise ConfigError(
                f"{sizes} of {origin} only {known}: {rows - known} rows of its embedding have "
                "no token.",
                fix="Prepare the data with the model's own tokenizer. If it is that tokenizer, and "
                f"the embedding is only padded, set model.vocab_size={rows}.",
            )
    model_class = MODELS.get(kind)
    theirs = model_class.check(own, seq_len=1).model_dump(mode="json")
    if differing := {
        key: (value, theirs[key])
        for key, value in stated.items()
        if key in theirs and value != theirs[key] and key not in FREE_OF_BASE
    }:
        raise _different(differing, init_from)
    own |= stated
    model_class.check(own, seq_len=config.data.seq_len)  # rejects unknown keys
    values = own | {"kind": kind}
    return config.with_values({f"model.{key}": value for key, value in values.items()})


def _different(keys: dict[str, tuple[object, object]], init_from: str) -> ConfigError:
    listed = "; ".join(
        f"model.{key} is {mine} here and {theirs} there" for key, (mine, theirs) in keys.items()
    )
    words = (f"model.{key}={json.dumps(theirs)}" for key, (_, theirs) in keys.items())
    return ConfigError(
        f"The configuration does not fit the base model {init_from}: {listed}.",
        fix="Remove the model's shape from the recipe: it comes from the base model. Or set "
        f"{' '.join(words)}.".replace('"', ""),
    )
