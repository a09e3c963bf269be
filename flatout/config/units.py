"""How values of other tools become flatout's: the cases of words.yaml, and its units, by name.

A unit receives the value, the word, the values found so far and the arguments that words.yaml
states. It returns values by key, the reason why the value cannot be converted, `Unneeded`, the
reason why nothing has to be set, or `Refused`, the reason why nothing of the config can be
converted. A key after `~` is set only when nothing else sets it; `--option` and SOURCE belong to
`flatout prepare`, and the empty key is a remark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from flatout.json_io import JsonObject
from flatout.registry import DATASETS, LOGGERS, MODELS, OPTIMIZERS, RECIPES
from flatout.words import Word, name_for, shape_for, value_for

Found: TypeAlias = JsonObject | str
"""Values by key, or why there are none."""
Known: TypeAlias = Mapping[str, Any]
"""The values found so far: flatout's by key, and the tool's by key after THEIRS."""
THEIRS = "their "
SOURCE = "SOURCE"
"""The argument of `flatout prepare`."""
HUB = "hf:"
"""Start of a model of the Hugging Face hub in train.init_from."""
OFF = {"none", "no", "off", "false", "disabled", "eager", "for-loop", "foreach", "0"}
"""Values, as text, that turn a feature off."""
BETAS = (0.9, 0.95)
"""The default of optim.betas."""
REGISTRIES = {"optimizer": OPTIMIZERS, "model": MODELS}
"""Names that are not listed in words.yaml, by what they name."""
OF_A_CLASS = re.compile(r"_?(for_?causal_?lm|lm_?head_?model|model)$")
"""End of the name of a model's class."""
TOKENIZERS = ("openai-community/gpt2", "char", "byte", "train:4096")
"""What names of tokenizers elsewhere stand for."""
ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""ORG/NAME."""
LITGPT = re.compile(r"^checkpoints/(?=[^/]+/[^/]+$)")
"""Start of a path where litgpt stores ORG/NAME of the hub."""
LITGPT_ON = ("lora_query", "lora_value")
"""litgpt's switches of layers with adapters that are on by default."""
NO_ADAPTER = "Only linear layers of the blocks have adapters."
OUTPUT = {"lm_head", "embed_out", "embed_tokens", "wte"}
"""Layers outside the blocks, which have no adapters."""
CONVERSATIONS, TEXTS = {"chat_template", "sharegpt", "chat"}, {"completion", "pretrain"}
"""Forms of rows in Axolotl."""
FILES = {".jsonl", ".json", ".parquet", ".csv", ".txt"}


class Unneeded(str):
    """The reason why a value needs no counterpart."""


class Refused(str):
    """The reason why nothing of a config can be converted, because of one value."""


REASONS = {"missing": str, "unneeded": Unneeded, "refused": Refused}
"""The keys of a case that states why there is no counterpart."""


def is_off(value: object) -> bool:
    """Return whether a value of another tool turns its feature off."""
    return not value or str(value).lower() in OFF


def in_cases(value: Any, word: Word) -> Found | None:
    """Return what the first case that has the value makes of it, or None when no case has it."""
    text, key = str(value).lower(), word.key or word.option
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {
        "disabled": is_off(value),
        "count": is_number and isinstance(value, int) and value > 0,
        "share": is_number and 0 < value < 1,
        "else": True,
    }
    for names, result in word.cases.items():
        if not any(kinds.get(name) or fnmatchcase(text, name) for name in str(names).split()):
            continue
        found = result if isinstance(result, dict) else {key: result}
        for name, reason in REASONS.items():
            if name in found:
                return reason(found[name].format(value=value, text=text, key=key))
        return {
            name: value
            if one == "$"
            else one.format(value=value, text=text)
            if isinstance(one, str)
            else one
            for name, one in found.items()
        }
    return None


def converted(value: Any, word: Word, known: Known) -> Found:
    """Return what becomes of a value: by its cases, else by its unit, else as it is."""
    try:
        found = in_cases(value, word)
        if found is None and word.unit:
            name, *arguments = word.unit.split()
            found = UNITS[name](value, word, known, *arguments)
    except (TypeError, ValueError, ArithmeticError):
        return f"The value {value!r} cannot be converted."
    return {word.key or word.option: value} if found is None else found


def positive(value: Any, word: Word, known: Known) -> Found:
    """Return the value; numbers below 1 and false mean that nothing is set."""
    off = value is False or (isinstance(value, int | float) and value <= 0)
    return {} if off else {word.key: value}


def times(value: Any, word: Word, known: Known, *keys: str) -> Found:
    """Return the product with the values of other keys, rounded if they are integers."""
    factors = [known.get(key) for key in keys]
    numbers = [factor for factor in factors if factor and isinstance(factor, int | float)]
    if len(numbers) < len(keys):
        return f"It is multiplied by {' and '.join(keys)}, which the config does not state."
    product = (value + 0) * math.prod(numbers)  # text plus 0 is an error
    return {word.key: product if isinstance(numbers[0], float) else round(product)}


def inverse(value: Any, word: Word, known: Known) -> Found:
    """Return an interval for a frequency."""
    return {word.key: 1 / value}


def half(value: Any, word: Word, known: Known, index: str) -> Found:
    """Return both betas, of which the value is one."""
    betas = [*known.get(word.key, BETAS)]
    betas[int(index)] = value
    return {word.key: betas}


def name(value: Any, word: Word, known: Known, noun: str, *listed: str) -> Found:
    """Return the name of a choice here; an optimizer may store its state in 8 bits."""
    first = str(value[0] if isinstance(value, list) and value else value)
    text = OF_A_CLASS.sub("", first.rpartition(".")[2].lower())
    names = listed or REGISTRIES[noun].names()
    found = text if text in names else name_for(noun, text, names) or value_for(word.key, text)
    if found is None:
        return f"There is no {noun} {first}; flatout has {', '.join(names)}."
    return {word.key: found} | ({"speedups": "+adamw-8bit"} if "8bit" in text else {})


def schedule(value: Any, word: Word, known: Known, *listed: str) -> Found:
    """Return the schedule; a line that starts late, by another key, is wsd."""
    found = name(value, word, known, "schedule", *listed)
    is_late = known.get("schedule.decay", 1) < 1
    return {word.key: "wsd"} if found == {word.key: "linear"} and is_late else found


def loggers(value: Any, word: Word, known: Known) -> Found:
    """Return the loggers that exist here; `all` leaves the choice to the default."""
    names = [str(one).lower() for one in (value if isinstance(value, list) else [value])]
    found = [one for one in names if one in LOGGERS.names()]
    if "all" in names or found or all(map(is_off, names)):
        return {} if "all" in names else {word.key: found}
    return f"There is no logger {', '.join(names)}; flatout has {', '.join(LOGGERS.names())}."


def steps(
    value: Any, word: Word, known: Known, in_epochs: str, strategy: str, *or_epochs: str
) -> Found:
    """Return a number of steps; a fraction below 1 is a share of the run, perhaps in epochs.

    With `or_epochs`, it counts epochs if the run does, and is long enough.
    """
    if not isinstance(value, int | float) or value <= 0:
        return {}
    total, epochs = known.get("train.steps"), known.get("train.epochs")
    epochs = None if "train.tokens" in known or total else epochs
    if or_epochs and epochs and value <= epochs:
        return {in_epochs: value}
    if known.get(f"{THEIRS}{strategy}") == "epoch":
        return Unneeded(f"{strategy}=epoch counts epochs instead.")
    if value >= 1:
        return {word.key: round(value)}
    if total:
        return {word.key: max(1, round(value * (total + 0)))}
    if not epochs:
        return "It is a share of an unknown length."
    return {in_epochs: value * (epochs + 0)}


def eval_strategy(value: Any, word: Word, known: Known) -> Found:
    """Return as many steps as between log records, which is the Trainer's default."""
    stated = known.keys() & {f"{THEIRS}eval_steps", "train.eval_every", word.key}
    if value == "steps" and not stated and "log.every" in known:
        return {"~train.eval_every": known["log.every"]}
    return Unneeded("eval_steps counts them.")


def warmup(value: Any, word: Word, known: Known) -> Found:
    """Return steps or a fraction; 0 may leave it to another key."""
    if known.get("schedule.kind") == "constant" and known.get(word.key) == 0:
        return Unneeded("The rate is constant from the first step on.")
    if isinstance(value, float) and value >= 1:
        value = round(value)
    return {word.key: value} if value else {f"~{word.key}": 0}


def decay_end(value: Any, word: Word, known: Known) -> Found:
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


def of_head(value: Any, word: Word, known: Known) -> Found:
    """Return a share of a head as a number of components, an even one."""
    width, heads = known.get("model.d_model"), known.get("model.num_heads")
    size = known.get("model.head_dim") or (width // heads if width and heads else None)
    if not size:
        return "It is a share of a head whose size is not stated."
    return {word.key: round((value + 0) * (size + 0) / 2) * 2}


def scales(value: Any, word: Word, known: Known) -> Found:
    """Return the scales, which a list or text states; a switch may turn them off."""
    parts = re.findall(r"\d+", value) if isinstance(value, str) else value
    return {f"~{word.key}": [int(part) for part in parts]}


def shape(value: Any, word: Word, known: Known) -> Found:
    """Return the shape that a model's name stands for, or torchtitan's names of it and its size."""
    model = str(value)
    if "flavor" in word.names:
        model = f"{known.get(f'{THEIRS}model.name')}_{value}"
    elif any(key.startswith(f"{THEIRS}model_config.") for key in known):
        return Unneeded("The keys of model_config state the shape.")
    elif f"{THEIRS}model.flavor" in known:
        return Unneeded("model.flavor states the shape with it.")
    keys = dict(shape_for(model) or {})
    if not keys:
        return (
            f"The name {model} does not state a shape: set the keys of model, or start from a "
            "recipe that `flatout list recipes` shows."
        )
    note, recipe = keys.pop("note", ""), keys.pop("recipe", None)
    if recipe:
        keys = RECIPES.get(recipe)["model"] | keys
    found = {f"~model.{key}": one for key, one in keys.items()} | {"": note}
    return found | ({"~data.seq_len": keys["max_seq_len"]} if "max_seq_len" in keys else {})


def weights(value: Any, word: Word, known: Known) -> Found:
    """Return where weights come from; ORG/NAME is a repository of the hub."""
    text = LITGPT.sub("", str(value))
    is_on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) and not text.endswith(".pt")
    return {word.key: f"{HUB}{text}" if is_on_hub else text}


def litgpt_layers(value: Any, word: Word, known: Known) -> Found:
    """Return the layers that all of litgpt's switches choose."""
    on = {one: known.get(f"{THEIRS}{one}", one in LITGPT_ON) for one in word.names}
    return targets([one for one in on if not is_off(on[one])], word, known)


def targets(value: Any, word: Word, known: Known) -> Found:
    """Return the names of the layers; those of the output weight have no adapter."""
    given = value if isinstance(value, list) else str(value).split(",")
    names = [str(one).strip().rpartition(".")[2] for one in given]
    meant = ", ".join(value_for(word.key, one) or one for one in names if one not in OUTPUT)
    return {word.key: [*dict.fromkeys(meant.split(", "))]} if meant else NO_ADAPTER


def packing(value: Any, word: Word, known: Known) -> Found:
    """Return whether attention stays within each document: not in TRL's strategy `wrapped`."""
    return {word.key: known.get(f"{THEIRS}packing_strategy") != "wrapped"}


def _dataset_of(known: Known) -> tuple[list[Any], Any]:
    """Return what may name a dataset of the hub, and the configuration of it."""
    names = [known.get(f"{THEIRS}{key}") for key in ("datasets.path", "dataset_name")]
    configs = (known.get(f"{THEIRS}{key}") for key in ("dataset_config_name", "datasets.name"))
    return names, next(filter(None, configs), None)


def hub_config(value: Any, word: Word, known: Known) -> Found:
    """Return that the source names the configuration, which needs the dataset's full name."""
    if any(ON_HUB.fullmatch(str(one)) for one in _dataset_of(known)[0]):
        return Unneeded("The source of `flatout prepare` names it.")
    return "`flatout prepare hub:ORG/NAME:config=CONFIG` reads it; the dataset has no ORG/NAME."


def dataset(value: Any, word: Word, known: Known) -> Found:
    """Return the directory to prepare a dataset in, and its source."""
    if not isinstance(value, str) or not value.strip("./ "):
        return "Prepare the data with `flatout prepare`, and set data.path."
    last = value.rstrip("/").rpartition("/")[2].rpartition("data.")[2].lower()
    on_hub, config = _dataset_of(known)
    title = name_for("dataset", last, DATASETS.names()) or last
    if config is not None:  # wikitext has wikitext-2 and wikitext-103
        title = str(config) if str(config).startswith(last) else f"{last}-{config}"
    found: JsonObject = {word.key: f"data/{re.sub(r'[^a-z0-9.]+', '-', title).strip('-')}"}
    if last.endswith("_char"):
        found["~--tokenizer"] = "char"
    if title in DATASETS.names():
        found[f"~{SOURCE}"] = title
    elif Path(value).suffix in FILES or Path(value).is_file():
        found[f"~{SOURCE}"] = value
    elif value in on_hub and ON_HUB.fullmatch(value):
        found[f"~{SOURCE}"] = f"hub:{value}" + (f":config={config}" if config else "")
    return found


def mix(value: Any, word: Word, known: Known) -> Found:
    """Return datasets with weights; a list of one is a dataset."""
    if isinstance(value, list) and len(value) == 1:
        one = value[0].get("path") if isinstance(value[0], dict) else value[0]
        return dataset(one, Word((), "keys", "data.path"), known)
    weights: JsonObject = {}
    for title, weight in value.items() if isinstance(value, dict) else ():
        found = dataset(title, word, known)
        if isinstance(found, dict) and isinstance(weight, int | float):
            weights[found[word.key]] = weight
    if weights and len(weights) == len(value):
        return {word.key: weights}
    return "Prepare each dataset with `flatout prepare`, and set data.mix='{data/a: 3, data/b: 1}'."


def as_option(value: Any, word: Word, known: Known) -> Found:
    """Return a field, a file or another text as it is."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return {word.option: one} if isinstance(one, str) else f"{word.option} takes a name."


def tokenizer(value: Any, word: Word, known: Known) -> Found:
    """Return the tokenizer, which may have another name here."""
    text = LITGPT.sub("", str(value))
    return {word.option: name_for("tokenizer", text, TOKENIZERS) or text}


def _form(known: Known) -> str | None:
    """Return Axolotl's name for the form of rows."""
    form = known.get(f"{THEIRS}datasets.type")
    return None if form is None else str(form).partition(".")[0]


def template(value: Any, word: Word, known: Known) -> Found:
    """Return the chat template, if the rows are conversations."""
    if _form(known) not in {None, *CONVERSATIONS}:
        return Unneeded("The rows are not conversations.")
    text = str(value).replace("tokenizer_default", "auto")
    if text in ("auto", "chatml", "plain") or text.endswith((".jinja", ".jinja2")):
        return {word.option: text}
    return f"There is no template {text}: `{word.option} auto` takes that of the tokenizer."


def trained_inputs(value: Any, word: Word, known: Known, *inverted: str) -> Found:
    """Return what the loss counts: all of a text, or the assistant's turns of a conversation."""
    is_trained, form = is_off(value) == bool(inverted), _form(known)
    if form in CONVERSATIONS:
        turns = "With --chat, the loss counts the assistant's turns"
        return f"{turns} and nothing else." if is_trained else Unneeded(f"{turns}.")
    if is_trained or form in TEXTS:
        return Unneeded("The loss counts all of the text.")
    return (
        f"`flatout prepare {word.option} FIELD` leaves the prompt of each row out; name its field."
    )


UNITS: dict[str, Callable[..., Found]] = {
    unit.__name__: unit
    for unit in (
        *(as_option, dataset, decay_end, eval_strategy, half, hub_config, inverse),
        *(litgpt_layers, loggers, mix, name, of_head, packing, positive, scales, schedule, shape),
        *(steps, targets, template, times, tokenizer, trained_inputs, warmup, weights),
    )
}
"""All units by name."""
