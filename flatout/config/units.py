"""How values of other tools become flatout's: a function for each `unit` of words.yaml.

A unit receives the value, the key of flatout (or the unit's argument), and the values found so far.
It returns values by key, none when the value says that nothing is set, or the reason why the value
cannot be converted. A key after `~` is set only when nothing else sets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flatout.json_io import JsonObject
from flatout.registry import DATASETS, LOGGERS, MODELS, OPTIMIZERS
from flatout.words import name_for, value_for

Unit = Callable[[Any, str, Mapping[str, Any]], "JsonObject | str"]
SCHEDULES = ("cosine", "linear", "wsd", "constant")
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
CHOICES = {
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "gelu_exact", "swiglu", "geglu", "relu2"),
    "model.positions": ("learned", "rotary"),
}
OFF = {"none", "no", "off", "false", "disabled", "eager", "for-loop", "foreach", "0"}
"""Values, as text, that turn a feature off."""
LATE = {
    "sequences",
    "batches",
    "of_lr",
    "of_width",
    "of_head",
    "schedule",
    "eval_interval",
    "save_interval",
    "hten",
}
"""Units that need the values of other keys."""
GPT2 = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"}
"""Names of GPT-2's sizes in nanoGPT."""
BETAS = (0.9, 0.95)
"""The default of optim.betas."""
BOARD = ["tensorboard"]
"""The default of log.to."""
SELECTIVE = "selective-"
ONE_LAYER = "lora.targets lists the layers, such as [q, v]."
OUTPUT = {"lm_head", "embed_out", "embed_tokens", "wte"}
"""Layers outside the blocks, which have no adapters."""
USUAL_RANK = 8
"""The rank of adapters that a config asks for without one: peft's default."""
UNITS: dict[str, Unit] = {
    "clip": lambda value, key, known: {key: value or 0},
    "beta1": lambda value, key, known: {key: [value, known.get(key, BETAS)[1]]},
    "beta2": lambda value, key, known: {key: [known.get(key, BETAS)[0], value]},
    "decays": lambda value, key, known: {key: "constant"} if is_off(value) else {},
    "fp16": lambda value, key, known: {} if is_off(value) else {key: "fp16"},
    "cpu": lambda value, key, known: {} if is_off(value) else {key: "cpu"},
    "flag": lambda value, key, known: {key: not is_off(value)},
    "kept": lambda value, key, known: {key: "all" if times(value, 1) < 1 else value},
    "all_linear": lambda value, key, known: {} if is_off(value) else {f"~{key}": ["all-linear"]},
    "one_layer": lambda value, key, known: {} if is_off(value) else ONE_LAYER,
    "rmsnorm": lambda value, key, known: {key: "layernorm" if is_off(value) else "rmsnorm"},
    "positions": lambda value, key, known: {key: value, "~data.seq_len": value},
    "hten": lambda value, key, known: {key: [1]} if is_off(value) else {f"~{key}": [1, 2, 4, 8]},
    "save_strategy": lambda value, key, known: {key: 1} if value == "epoch" else {},
    "saves_per_epoch": lambda value, key, known: {key: 1 / value} if value else {},
    "evals_per_epoch": lambda value, key, known: {key: 1 / value} if value else {},
    "to_wandb": lambda value, key, known: {} if is_off(value) else {key: ["tensorboard", "wandb"]},
    "to_mlflow": lambda value, key, known: (
        {} if is_off(value) else {key: ["tensorboard", "mlflow"]}
    ),
    "to_tensorboard": lambda value, key, known: {
        f"~{key}": [] if is_off(value) else ["tensorboard"]
    },
    "auto": lambda value, name, known: {"speedups": f"-{name}"} if is_off(value) else {},
    "unless": lambda value, name, known: {} if is_off(value) else {"speedups": f"-{name}"},
    "asked": lambda value, name, known: (
        {} if is_off(value) else {"speedups": f"+{SELECTIVE * (value == 'selective')}{name}"}
    ),
    "eval_strategy": lambda value, key, known: (
        {key: 1} if value == "epoch" else {"~train.eval_every": 0} if is_off(value) else {}
    ),
}
"""Units of one expression; `auto`, `unless` and `asked` edit the speedups."""


def unit(function: Unit) -> Unit:
    """Register a function under its name."""
    UNITS[function.__name__] = function
    return function


def times(value: Any, factor: Any) -> Any:
    """Return the product of two numbers; text must not be repeated.

    Raises: TypeError when one of them is no number.
    """
    return (value + 0) * (factor + 0)  # text plus 0 is an error; text times a number is not


def is_off(value: object) -> bool:
    """Return whether a value of another tool turns its feature off."""
    return not value or str(value).lower() in OFF


@unit
def positive(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the value; numbers below 1 and false mean that nothing is set."""
    return {} if value is False or (isinstance(value, int | float) and value <= 0) else {key: value}


@unit
def steps(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a number of steps; a fraction below 1 is a share of the run."""
    if not isinstance(value, int | float) or value <= 0:
        return {}
    if value >= 1:
        return {key: round(value)}
    total = known.get("train.steps")
    return (
        {key: max(1, round(times(value, total)))}
        if total
        else "It is a share of an unknown length."
    )


@unit
def sequences(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the tokens of a number of sequences."""
    if not isinstance(value, int) or value <= 0:
        return {}
    length = known.get("data.seq_len")
    return {key: times(value, length)} if length else "It counts sequences of an unknown length."


@unit
def batches(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the tokens of a number of micro-batches; -1 and the share 1.0 are all of them."""
    if value == -1 or (isinstance(value, float) and value == 1):
        return {key: "all"}
    rows, length = known.get("batch.rows_per_device"), known.get("data.seq_len")
    if not isinstance(value, int) or not isinstance(rows, int) or not length:
        return "It counts micro-batches of an unknown size."
    return {key: times(value, times(rows, length))}


@unit
def of_lr(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a share of the peak learning rate."""
    peak = known.get("optim.lr")
    return (
        {key: times(value, peak)}
        if peak
        else "It is a share of a learning rate that is not stated."
    )


@unit
def of_width(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a multiple of the model's width."""
    width = known.get("model.d_model")
    return (
        {key: round(times(value, width))} if width else "It multiplies a width that is not stated."
    )


@unit
def of_head(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a share of a head as a number of components, an even one; 1 is the whole head."""
    width, heads = known.get("model.d_model"), known.get("model.num_heads")
    size = known.get("model.head_dim") or (width // heads if width and heads else None)
    if value == 1:
        return {}
    if not size:
        return "It is a share of a head whose size is not stated."
    return {key: round(times(value, size) / 2) * 2}


@unit
def optimizer(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the optimizer, and the speedup that stores its state in 8 bits."""
    last = str(value).rpartition(".")[2].lower()
    kind = last if last in OPTIMIZERS.names() else name_for("optimizer", last, OPTIMIZERS.names())
    if kind is None:
        return f"There is no optimizer {last}; flatout has {' and '.join(OPTIMIZERS.names())}."
    return {key: kind} | ({"speedups": "+adamw-8bit"} if "8bit" in last else {})


@unit
def schedule(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the schedule; a line that starts late, by another key, is wsd."""
    name = str(value).lower()
    kind = name if name in SCHEDULES else name_for("schedule", name, SCHEDULES)
    if kind is None:
        return f"There is no schedule {name}; flatout has {', '.join(SCHEDULES)}."
    return {key: "wsd" if kind == "linear" and known.get("schedule.decay", 1) < 1 else kind}


@unit
def warmup(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return steps or a fraction; 0 may leave it to another key."""
    if isinstance(value, float) and value >= 1:
        value = round(value)
    return {key: value} if value else {"~schedule.warmup": 0}


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
    if value in (-1, "-1"):
        return {key: "all"}
    return {key: value} if isinstance(value, int) and value > 1 else {}


def in_epochs(value: Any, known: Mapping[str, Any]) -> bool:
    """Return whether an interval counts epochs: the run does, and it is long enough."""
    epochs = None if {"train.steps", "train.tokens"} & known.keys() else known.get("train.epochs")
    return epochs is not None and isinstance(value, int | float) and 0 < value <= epochs


@unit
def eval_interval(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return steps between evaluations, or epochs if it counts these."""
    if in_epochs(value, known):
        return {"train.eval_every_epochs": value}
    return steps(value, key, known)


@unit
def save_interval(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return steps between saves, or epochs if it counts these."""
    if in_epochs(value, known):
        return {"checkpoint.every_epochs": value}
    return steps(value, key, known)


@unit
def dataset(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the directory to prepare a dataset in."""
    if not isinstance(value, str) or not value.strip("./ "):
        return "Prepare the data with `flatout prepare`, and set data.path."
    last = value.rstrip("/").rpartition("/")[2].rpartition("data.")[2].lower()
    name = name_for("dataset", last, DATASETS.names()) or last
    return {key: f"data/{re.sub(r'[^a-z0-9.]+', '-', name).strip('-')}"}


@unit
def mix(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return datasets with weights; a list of one is a dataset."""
    if isinstance(value, list) and len(value) == 1:
        one = value[0].get("path") if isinstance(value[0], dict) else value[0]
        return dataset(one, "data.path", known)
    weights: JsonObject = {}
    for name, weight in value.items() if isinstance(value, dict) else ():
        found = dataset(name, key, known)
        if isinstance(found, dict) and isinstance(weight, int | float):
            weights[found[key]] = weight
    if weights and len(weights) == len(value):
        return {key: weights}
    return "Prepare each dataset with `flatout prepare`, and set data.mix='{data/a: 3, data/b: 1}'."


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
    return {key: mode} if mode in ("online", "offline") else {}


@unit
def kind(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the model that an architecture is."""
    first = value[0] if isinstance(value, list) and value else value
    name = re.sub(r"(for_?causal_?lm|lm_?head_?model|model)$", "", str(first).lower())
    if "eigenstate" in name:
        return {key: "eigenstate"}
    found = name if name in MODELS.names() else name_for("model", name, MODELS.names())
    return {key: found} if found else f"There is no model {first}: {', '.join(MODELS.names())}."


@unit
def named(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the name of a choice."""
    meant = value_for(key, value) or str(value).lower()
    choices = CHOICES[key]
    return {key: meant} if meant in choices else f"{key} is {' or '.join(choices)}."


@unit
def scales(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the scales, which a list or text states; a switch may turn them off."""
    parts = re.findall(r"\d+", value) if isinstance(value, str) else value
    return {"~model.scales": [int(part) for part in parts]}


@unit
def weights(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return where weights come from; nothing for random weights or a resumed run.

    ORG/NAME is a repository of the hub, and so are the names that nanoGPT has for GPT-2.
    """
    if is_off(value) or value in ("scratch", "resume"):
        return {}
    text = str(value)
    if text in GPT2:
        return {key: f"hf:openai-community/{text}"}
    is_on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) and not text.endswith(".pt")
    return {key: f"hf:{text}" if is_on_hub else text}


@unit
def adapter(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a rank, which another key may state; QLoRA and other methods do not exist here."""
    if is_off(value):
        return {}
    if str(value).lower() in {"lora", "true", "yes", "on"}:
        return {f"~{key}": USUAL_RANK}
    return f"There is no {value}: adapters are plain LoRA beside weights in fp32 or bf16."


@unit
def targets(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the names of the layers; those of the output weight have no adapter."""
    if is_off(value):
        return {}
    given = value if isinstance(value, list) else str(value).split(",")
    names = [str(name).strip().rpartition(".")[2] for name in given]
    meant = ", ".join(value_for(key, name) or name for name in names if name not in OUTPUT)
    found = list(dict.fromkeys(meant.split(", "))) if meant else []
    return {key: found} if found else "Only linear layers of the blocks have adapters."
