"""Units of the batch, the optimizer, the schedule, devices, checkpoints and logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flatout.config.units.base import (
    HUB,
    LITGPT,
    THEIRS,
    UNITS,
    Refused,
    Unneeded,
    early,
    is_off,
    late,
    times,
    unit,
)
from flatout.json_io import JsonObject
from flatout.registry import LOGGERS, OPTIMIZERS
from flatout.words import name_for, value_for

SCHEDULES = ("cosine", "linear", "wsd", "constant")
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
GPT2 = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"}
"""Names of GPT-2's sizes in nanoGPT."""
BETAS = (0.9, 0.95)
"""The default of optim.betas."""
BOARD = ["tensorboard"]
"""The default of log.to."""
SELECTIVE = "selective-"
LITGPT_LAYERS = {
    "lora_query": "q",
    "lora_key": "k",
    "lora_value": "v",
    "lora_projection": "o",
    "lora_mlp": "gate, up, down",
}
"""litgpt's switches of the layers with adapters; lora_query and lora_value are on by default."""
ONLY_SCORES = Refused("trains nothing; `flatout eval RUN` scores a run")
OTHER_TRAINING = Refused("is training on preferences or rewards; flatout trains on the next token")
NO_ADAPTER = "Only linear layers of the blocks have adapters."
OUTPUT = {"lm_head", "embed_out", "embed_tokens", "wte"}
"""Layers outside the blocks, which have no adapters."""
USUAL_RANK, TRL_RANK = 8, 16
"""The rank of adapters that a config asks for without one: the default of peft, and of TRL."""
PREFERENCE_LOSSES = (
    *("sigmoid", "hinge", "ipo", "kto", "kto_pair", "exo_pair", "nca_pair", "robust", "bco_pair"),
    *("sppo_hard", "aot", "aot_pair", "apo_zero", "apo_down"),
)
"""Losses of TRL's training on preferences; with `nll`, the default, SFT is meant."""
UNITS |= {
    "clip": lambda value, key, known: {key: value or 0},
    "beta1": lambda value, key, known: {key: [value, known.get(key, BETAS)[1]]},
    "beta2": lambda value, key, known: {key: [known.get(key, BETAS)[0], value]},
    "fp16": lambda value, key, known: {} if is_off(value) else {key: "fp16"},
    "cpu": lambda value, key, known: {} if is_off(value) else {key: "cpu"},
    "flag": lambda value, key, known: {key: not is_off(value)},
    "kept": lambda value, key, known: {key: "all" if times(value, 1) < 1 else value},
    "all_linear": lambda value, key, known: {} if is_off(value) else {f"~{key}": ["all-linear"]},
    "no_adapter": lambda value, key, known: {} if is_off(value) else NO_ADAPTER,
    "only_scores": lambda value, key, known: {} if is_off(value) else ONLY_SCORES,
    "loss_type": lambda value, key, known: OTHER_TRAINING if value in PREFERENCE_LOSSES else {},
    "other_training": lambda value, key, known: {} if is_off(value) else OTHER_TRAINING,
    "saves_per_epoch": lambda value, key, known: {key: 1 / value} if value else {},
    "evals_per_epoch": lambda value, key, known: {key: 1 / value} if value else {},
    "to_wandb": lambda value, key, known: {} if is_off(value) else {key: [*BOARD, "wandb"]},
    "to_mlflow": lambda value, key, known: {} if is_off(value) else {key: [*BOARD, "mlflow"]},
    "to_tensorboard": lambda value, key, known: {f"~{key}": [] if is_off(value) else BOARD},
    "auto": lambda value, name, known: {"speedups": f"-{name}"} if is_off(value) else {},
    "unless": lambda value, name, known: {} if is_off(value) else {"speedups": f"-{name}"},
    "asked": lambda value, name, known: (
        {} if is_off(value) else {"speedups": f"+{SELECTIVE * (value == 'selective')}{name}"}
    ),
}
"""Units of one expression; `auto`, `unless` and `asked` edit the speedups."""
IN_EPOCHS = {
    "train.eval_every": "train.eval_every_epochs",
    "checkpoint.every_steps": "checkpoint.every_epochs",
}
"""The key that counts epochs, by the one that counts steps."""


@unit
def positive(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the value; numbers below 1 and false mean that nothing is set."""
    return {} if value is False or (isinstance(value, int | float) and value <= 0) else {key: value}


@late
def steps(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a number of steps; a fraction below 1 is a share of the run."""
    strategy = f"{'eval' if key == 'train.eval_every' else 'save'}_strategy"
    if not isinstance(value, int | float) or value <= 0:
        return {}
    if known.get(f"{THEIRS}{strategy}") == "epoch":
        return Unneeded(f"{strategy}=epoch counts epochs instead.")
    if value >= 1:
        return {key: round(value)}
    if total := known.get("train.steps"):
        return {key: max(1, round(times(value, total)))}
    epochs = None if "train.tokens" in known else known.get("train.epochs")
    if not epochs:
        return "It is a share of an unknown length."
    return {IN_EPOCHS[key]: times(value, epochs)}


@late
def sequences(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the tokens of a number of sequences."""
    if not isinstance(value, int) or value <= 0:
        return {}
    length = known.get("data.seq_len")
    return {key: times(value, length)} if length else "It counts sequences of an unknown length."


@late
def batches(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the tokens of a number of micro-batches; -1 and the share 1.0 are all of them."""
    if value == -1 or (isinstance(value, float) and value == 1):
        return {key: "all"}
    rows, length = known.get("batch.rows_per_device"), known.get("data.seq_len")
    if not isinstance(value, int) or not isinstance(rows, int) or not length:
        return "It counts micro-batches of an unknown size."
    return {key: times(value, times(rows, length))}


@late
def of_lr(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a share of the peak learning rate."""
    peak = known.get("optim.lr")
    return (
        {key: times(value, peak)}
        if peak
        else "It is a share of a learning rate that is not stated."
    )


@unit
def optimizer(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the optimizer, and the speedup that stores its state in 8 bits."""
    last = str(value).rpartition(".")[2].lower()
    kind = last if last in OPTIMIZERS.names() else name_for("optimizer", last, OPTIMIZERS.names())
    if kind is None:
        return f"There is no optimizer {last}; flatout has {' and '.join(OPTIMIZERS.names())}."
    return {key: kind} | ({"speedups": "+adamw-8bit"} if "8bit" in last else {})


@late
def schedule(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the schedule; a line that starts late, by another key, is wsd."""
    name = str(value).lower()
    kind = name if name in SCHEDULES else name_for("schedule", name, SCHEDULES)
    if kind is None:
        return f"There is no schedule {name}; flatout has {', '.join(SCHEDULES)}."
    return {key: "wsd" if kind == "linear" and known.get("schedule.decay", 1) < 1 else kind}


@early
def decays(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a constant rate, without warm-up, when nanoGPT's switch is off."""
    return {key: "constant", "schedule.warmup": 0} if is_off(value) else {}


@unit
def warmup(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return steps or a fraction; 0 may leave it to another key."""
    if known.get("schedule.kind") == "constant" and known.get(key) == 0:
        return Unneeded("The rate is constant from the first step on.")
    if isinstance(value, float) and value >= 1:
        value = round(value)
    return {key: value} if value else {"~schedule.warmup": 0}


@late
def decay_end(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return why the decay cannot end at a step, unless it is the last one."""
    last = known.get("train.steps")
    if known.get("schedule.kind") == "constant":
        return Unneeded("The rate is constant.")
    if value == last:
        return Unneeded("The decay ends with the run.")
    if not last:
        return "The decay ends with the run, whose length in steps is not stated."
    shorter = f" train.steps={value} ends both there." if value < last else ""
    return f"The decay ends with the run, at step {last}, not at step {value}.{shorter}"


@unit
def precision(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the precision of the matrix products."""
    name = str(value).lower()
    meant = name if name in PRECISIONS else value_for(key, value)
    return {key: meant} if meant else f"There is no precision {name}: {', '.join(PRECISIONS)}."


@unit
def bf16(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return bf16, or fp32 unless another key asks for fp16."""
    if is_off(value):
        return {"~train.precision": "fp32"}
    return {key: "auto" if value == "auto" else "bf16"}


@unit
def device(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the device."""
    name = {"gpu": "cuda"}.get(str(value).lower(), str(value).lower())
    return (
        {key: name}
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", name)
        else f"There is no device {name}: auto, cpu, cuda, cuda:N or mps."
    )


@unit
def devices(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the number of devices; -1 is all of them, and one is the default."""
    if value == "auto":
        return Unneeded("One device is the default; train.devices=all takes every GPU.")
    if value in (-1, "-1"):
        return {key: "all"}
    return {key: value} if isinstance(value, int) and value > 1 else {}


def in_epochs(value: Any, known: Mapping[str, Any]) -> bool:
    """Return whether an interval counts epochs: the run does, and it is long enough."""
    epochs = None if {"train.steps", "train.tokens"} & known.keys() else known.get("train.epochs")
    return epochs is not None and isinstance(value, int | float) and 0 < value <= epochs


@late
def eval_interval(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return steps between evaluations, or epochs if it counts these."""
    if in_epochs(value, known):
        return {"train.eval_every_epochs": value}
    return steps(value, key, known)


@late
def save_interval(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return steps between saves, or epochs if it counts these."""
    if in_epochs(value, known):
        return {"checkpoint.every_epochs": value}
    return steps(value, key, known)


@late
def eval_strategy(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return one epoch, or as many steps as between log records, which is the Trainer's default."""
    if value == "epoch":
        return {key: 1}
    if is_off(value):
        return {"~train.eval_every": 0}
    stated = known.keys() & {f"{THEIRS}eval_steps", "train.eval_every", key}
    if value == "steps" and not stated and "log.every" in known:
        return {"~train.eval_every": known["log.every"]}
    return Unneeded("eval_steps counts them.")


@unit
def save_strategy(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return one epoch; steps are counted by another key."""
    if value == "epoch":
        return {key: 1}
    if value == "best":
        return Unneeded("The best checkpoint is always kept.")
    return {} if is_off(value) else Unneeded("save_steps counts them.")


@unit
def shard(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the number of processes that weights are sharded over."""
    if is_off(value) or (value == 1 and value is not True):
        return {}
    if isinstance(value, int) and value > 1:
        return {key: value}
    return "Set parallel.shard to the number of processes."


@unit
def loggers(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the loggers that exist here; `all` leaves the choice to the default."""
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    if "all" in names:
        return {}
    found = [name for name in names if name in LOGGERS.names()]
    if found or all(is_off(name) for name in names):
        return {key: found}
    return f"There is no logger {', '.join(names)}; flatout has {', '.join(LOGGERS.names())}."


@unit
def wandb_mode(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the mode; `disabled` turns the logger off, which is another key."""
    mode = {"dryrun": "offline", "run": "online"}.get(str(value), str(value))
    return {key: mode} if mode in ("online", "offline") else Unneeded("log.to names W&B, or not.")


@unit
def weights(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return where weights come from; nothing for random weights or a resumed run.

    ORG/NAME is a repository of the hub, and so are the names that nanoGPT has for GPT-2.
    """
    if value == "resume":
        return Unneeded("The same command resumes a run; `--resume PATH` continues another one.")
    if is_off(value) or value == "scratch":
        return Unneeded("A run starts with random weights unless train.init_from names others.")
    text = re.sub(LITGPT, "", str(value))
    if text in GPT2:
        return {key: f"{HUB}openai-community/{text}"}
    is_on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) and not text.endswith(".pt")
    return {key: f"{HUB}{text}" if is_on_hub else text}


@unit
def adapter(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a rank, which another key may state; QLoRA and other methods do not exist here."""
    if is_off(value):
        return {}
    if str(value).lower() in {"lora", "true", "yes", "on"}:
        return {f"~{key}": TRL_RANK if f"{THEIRS}use_peft" in known else USUAL_RANK}
    return f"There is no {value}: adapters are plain LoRA beside weights in fp32 or bf16."


@unit
def litgpt_layers(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the layers that all of litgpt's switches choose."""
    found = []
    for name, layers in LITGPT_LAYERS.items():
        if not is_off(known.get(f"{THEIRS}{name}", name in ("lora_query", "lora_value"))):
            found += layers.split(", ")
    return {key: found} if found else NO_ADAPTER


@unit
def packing(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return whether attention stays within each document.

    It does where each has a row of its own, and where packed ones are separated: everywhere but in
    TRL's strategy `wrapped`.
    """
    return {key: is_off(value) or known.get(f"{THEIRS}packing_strategy") != "wrapped"}


@unit
def targets(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the names of the layers; those of the output weight have no adapter."""
    if is_off(value):
        return {}
    given = value if isinstance(value, list) else str(value).split(",")
    names = [str(name).strip().rpartition(".")[2] for name in given]
    meant = ", ".join(value_for(key, name) or name for name in names if name not in OUTPUT)
    found = list(dict.fromkeys(meant.split(", "))) if meant else []
    return {key: found} if found else NO_ADAPTER
