"""Resolve a configuration: fill in every open value, once, before a run is built."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatout.assembly.batch import sequences_of, with_batch
from flatout.assembly.choices import (
    Decision,
    adding,
    assemble,
    memory_savers,
    parse_request,
    parts_of,
    select,
    speedups_for,
)
from flatout.assembly.compiling import compile_cost
from flatout.assembly.measured import gains_here
from flatout.assembly.memory import (
    CUDA_CONTEXT,
    CUDA_RESERVED,
    USED_MEMORY,
    estimate,
    memory_bytes,
    workload_of,
)
from flatout.assembly.parts import Parts, divisors
from flatout.assembly.preflight import check_names
from flatout.assembly.shape import with_shape
from flatout.config.schema import RunConfig
from flatout.config.sections import TrainConfig
from flatout.data.load.batches import BatchPlan, SequenceSteps, StepReader
from flatout.data.store.mix import AnyDataset, members_of
from flatout.display import memory_size
from flatout.distributed.layout import Layout, layout_of
from flatout.errors import ConfigError
from flatout.hardware.machine import ASSUMED_MFU, Machine
from flatout.hardware.roofline import peak_tflops
from flatout.models.language_model import Flops, LanguageModel, LanguageModelConfig, model_of
from flatout.progress import counted

known_peak = functools.cache(peak_tflops)
"""Like `peak_tflops`, but measures at most once per process."""
WITHOUT_IT = "without it"
"""How the reason for a speedup begins that was added because nothing fits without it."""
MICRO_BATCHES = 8
"""Micro-batches of a step for each process of a pipeline, which then waits for at most an eighth
of the time.
"""
EVALUATIONS, MIN_BETWEEN_EVALUATIONS = 20, 10
"""Evaluations of a run that states no interval, and the fewest steps between two."""
EVALUATION_SHARE, MIN_SEQUENCES = 0.05, 32
"""Most of the run's work that they take, and the fewest sequences that one of them scores."""


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
    requested, layout = config.train, layout_of(config.parallel, world_size)
    check_names(config)
    config = with_shape(with_batch(config, layout), dataset)
    steps = steps_stated(config, requested, dataset)
    config = config.with_values({"train.steps": steps})
    available = memory_bytes(machine, requested.device, local_world_size or world_size)
    config, decisions = with_choices(
        config, machine=machine, layout=layout, available=available, cache=cache
    )
    steps = steps_stated(config, requested, dataset, padded_steps(config, dataset))
    epochs = requested.epochs or (0 if requested.steps or requested.tokens else 1)
    config = config.with_values({"train.steps": steps})
    return with_evaluations(config, dataset, epochs), decisions


def with_choices(
    config: RunConfig, *, machine: Machine, layout: Layout, available: int, cache: Path | None
) -> tuple[RunConfig, list[Decision]]:
    """Return the configuration with its speedups, its precision and its rows, and the decisions.

    `available` are the bytes of one rank.
    """
    train, device = config.train, config.train.device
    dtype: str = machine.gpu_dtype
    if device == "cpu":
        narrow = machine.cpu_multiplies_bf16 and train.precision != "fp32"
        dtype = "bf16" if narrow else "fp32"
    peak = known_peak(machine, device, dtype) if device == "cpu" or machine.gpus else None
    tflops = layout.world_size * peak.tflops * ASSUMED_MFU if peak else None
    minutes = expected_minutes(config, tflops) if tflops else None
    is_marked = device == "cpu" and cache is not None
    decisions = select(
        config,
        machine,
        device=device,
        minutes=minutes,
        measured=gains_here(machine, device, cache, functools.partial(flops_per_token, config)),
        compile_cost=compile_cost(config, minutes) if is_marked else 1.0,
    )
    share = sequences_of(config) // layout.dp_size
    if device.startswith("cuda"):
        decisions = with_checkpointing(config, decisions, available, share)
    on = [decision.name for decision in decisions if decision.on]
    if config.batch.by_tokens and not speedups_for("batching", on):
        names = speedups_for("batching")
        raise ConfigError(
            f"batch.by_tokens=true needs the speedup {names[0]}, whose rows are documents.",
            fix=f"Set speedups={adding(config.speedups, names)}, or remove the key.",
        )
    parts, rows = assemble(on), config.batch.rows_per_device
    if rows == "auto":
        usable = int(USED_MEMORY * available) if device.startswith("cuda") else None
        rows = rows_for(config, parts, share, usable)
        # The config now states the rows: the speedup that chose them has no further effect.
        on = [name for name in on if name not in speedups_for("most_rows")]
    values = {
        "batch.rows_per_device": rows,
        "batch.accumulate": share // rows,
        "train.precision": parts.precision.name,
        "speedups": on or "none",
    }
    return config.with_values(values), decisions


def rows_for(config: RunConfig, parts: Parts, share: int, usable: int | None) -> int:
    """Return the most useful rows of a micro-batch that divide a rank's `share` of a step.

    On a GPU they must fit into the `usable` bytes by estimate. If a single one does not, or cannot
    be estimated, the run tries it.
    """
    most = parts.most_rows(config.data.seq_len, config.train.device)
    if (stages := config.parallel.pipeline) > 1:
        most = min(most, max(share // (MICRO_BATCHES * stages), 1))
    for rows in divisors(share // stages, most):
        need = None if usable is None or rows == 1 else need_of(config, parts, rows, share // rows)
        if need is None or usable is None or need <= usable:
            break
    return rows


def need_of(config: RunConfig, parts: Parts, rows: int, accumulate: int) -> int | None:
    """Return the bytes of a step by estimate, or None. A custom model may need values."""
    try:
        return estimate(workload_of(config, parts), rows, accumulate).total
    except Exception:  # if it is the model's fault, the run states it
        return None


def with_checkpointing(
    config: RunConfig, decisions: list[Decision], available: int, share: int
) -> list[Decision]:
    """Return the decisions, with activation checkpointing on if nothing fits a GPU without it.

    Only `auto` adds it: the selective one if that is enough, or else the full one. What must fit is
    the stated micro-batch of a rank's `share`, or one row, if it can with some room.
    """
    on, rows = [each.name for each in decisions if each.on], config.batch.rows_per_device
    request, savers = parse_request(config.speedups), memory_savers(config.train.device)
    if (
        not request.auto
        or speedups_for("activations", on)
        or {*request.named, *request.dropped} & {*savers}
    ):
        return decisions
    limits = [(available - CUDA_CONTEXT) / CUDA_RESERVED]
    if rows == "auto":
        rows, share, limits = 1, 2, [USED_MEMORY * available, *limits]

    def need(*added: str) -> int | None:
        return need_of(config, assemble([*on, *added]), rows, share // rows)

    if (without := need()) is None:
        return decisions
    for limit in limits:
        if without <= limit:
            return decisions
        fits = (one for one in savers if (less := need(one)) and less <= limit)
        if (name := next(fits, None)) is not None:
            break
    else:
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


def steps_stated(
    config: RunConfig,
    requested: TrainConfig,
    dataset: AnyDataset | None,
    padded: StepReader | None = None,
) -> int | None:
    """Return the length that `requested` states, in optimizer steps of a run with resolved batches.

    If it has a `padded` reader, steps contain padding, and thus fewer tokens.
    Returns: None for a length in epochs without a dataset.
    """
    if requested.steps is not None:
        return requested.steps
    epochs, seq_len = requested.epochs or 1.0, config.data.seq_len
    per_step = config.batch.tokens_per_step or 1
    if dataset is None:
        return math.ceil((requested.tokens or 0) / per_step) or None
    if padded is None:
        tokens = requested.tokens or epochs * epoch_tokens(dataset, seq_len)
        return max(math.ceil(tokens / per_step), 1)
    if requested.tokens:
        epochs = requested.tokens / padded.tokens_per_epoch
    return max(math.ceil(epochs * padded.steps_per_epoch), 1)


def padded_steps(config: RunConfig, dataset: AnyDataset | None) -> StepReader | None:
    """Return the reader of a run with resolved batches whose steps contain padding, else None."""
    plain: object = SequenceSteps
    batching = parts_of(config).batching
    if dataset is None or batching is plain:
        return None
    plan = BatchPlan(config.data.seq_len, sequences_of(config), 1, by_tokens=config.batch.by_tokens)
    return batching(dataset.split("train"), plan, None)


def tokens_per_step(config: RunConfig, dataset: AnyDataset | None) -> float:
    """Return the mean tokens of a step of a run with resolved batches, without padding."""
    if reader := padded_steps(config, dataset):
        return reader.tokens_per_epoch / reader.steps_per_epoch
    return config.batch.tokens_per_step or 0


def epoch_tokens(dataset: AnyDataset, seq_len: int) -> int:
    """Return the tokens in one pass over the training split or mix, in whole sequences."""
    return dataset.split("train").num_sequences(seq_len) * seq_len


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
        every = steps_stated(
            config, TrainConfig(epochs=per_epoch), dataset, padded_steps(config, dataset)
        )
    elif every is None:
        every = max(math.ceil(steps / EVALUATIONS), MIN_BETWEEN_EVALUATIONS)
    if tokens is None:
        tokens = "all"
        if every and train.eval_every is None and train.eval_every_epochs is None:
            # scoring a token takes a third of the work of training on it
            trained = 3 * EVALUATION_SHARE * every * (config.batch.tokens_per_step or 0)
            sequences = max(int(trained) // config.data.seq_len, MIN_SEQUENCES)
            if sequences * config.data.seq_len < validation_tokens(dataset):
                tokens = sequences * config.data.seq_len
    return config.with_values({"train.eval_every": every, "train.eval_tokens": tokens})


def validation_tokens(dataset: AnyDataset | None) -> int:
    """Return the tokens of the validation splits."""
    members = members_of(dataset) if dataset else ()
    return sum(member.dataset.split("val").num_tokens for member in members)


def tokens_to_score(config: RunConfig, dataset: AnyDataset | None) -> int:
    """Return the validation tokens that a run scores. 0 without a dataset.

    The last evaluation is on the whole split. If those during the run are on a part of it, that
    part is scored at the end, too.
    """
    train, whole = config.train, validation_tokens(dataset)
    if not train.eval_every:
        return whole
    scored = 1 + max((train.steps or 0) - 1, 0) // train.eval_every
    if train.eval_tokens is None or train.eval_tokens == "all":
        return whole * scored
    return min(train.eval_tokens, whole) * scored + whole


def expected_minutes(config: RunConfig, tflops: float) -> float | None:
    """Return the minutes of a run's matmuls, or None if its length depends on the data.

    Units:  tflops is the rate of all processes together.
    """
    if config.batch.tokens_per_step is None:
        config = with_batch(config, Layout())
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
