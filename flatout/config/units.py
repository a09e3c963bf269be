"""How values of other tools become flatout's: the cases of words.yaml, and its units, by name.

A unit is a name and perhaps arguments. It converts a value, with the values found so far, to the
value of the word's key or option, to a mapping of several keys, or to a `Reason` why there is none.
A key after `~` is set only when nothing else sets it. `--option` and SOURCE belong to `flatout
prepare`, and the empty key is a remark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from flatout.config.registry import DATASETS, LOGGERS, MODELS, OPTIMIZERS, RECIPES
from flatout.config.words import Word, name_for, shape_for, value_for
from flatout.storage.json_io import JsonObject

Known: TypeAlias = Mapping[str, Any]
"""The values found so far: flatout's by key, and the tool's by key after THEIRS."""
THEIRS = "their "
SOURCE = "SOURCE"
"""The argument of `flatout prepare`."""
HUB = "hf:"
"""Start of a model of the Hugging Face hub in train.init_from."""
OFF = {"none", "no", "off", "false", "disabled", "eager", "for-loop", "foreach", "0"}
"""Values, as text, that turn a feature off."""
REGISTRIES = {"optimizer": OPTIMIZERS, "model": MODELS, "logger": LOGGERS}
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
OUTPUT = {"lm_head", "embed_out", "embed_tokens", "wte"}
"""Layers outside the blocks, which have no adapters."""
CONVERSATIONS, TEXTS = {"chat_template", "sharegpt", "chat"}, {"completion", "pretrain"}
"""Forms of rows in Axolotl."""
FILES = {".jsonl", ".json", ".parquet", ".csv", ".txt"}


class Reason(str):
    """Why a value has no counterpart: there is none."""


class Unneeded(Reason):
    """The reason why a value needs no counterpart."""


class Refused(Reason):
    """The reason why nothing of a config can be converted, because of one value."""


Found: TypeAlias = JsonObject | Reason
"""Values by key, or why there are none."""
REASONS = {"missing": Reason, "unneeded": Unneeded, "refused": Refused}
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
        filled = {
            name: value
            if one == "$"
            else one.format(value=value, text=text, key=key)
            if isinstance(one, str)
            else one
            for name, one in found.items()
        }
        reason = next((REASONS[name](one) for name, one in filled.items() if name in REASONS), None)
        return filled if reason is None else reason
    return None


def converted(value: Any, word: Word, known: Known) -> Found:
    """Return what becomes of a value: by its cases, else by its unit, else as it is."""
    try:
        found = in_cases(value, word)
        if found is not None:
            return found
        if word.unit:
            value = _by_unit(value, word, known)
    except (TypeError, ValueError, ArithmeticError):
        return Reason(f"The value {value!r} cannot be converted.")
    return value if isinstance(value, dict | Reason) else {word.key or word.option: value}


def _by_unit(value: Any, word: Word, known: Known) -> Any:
    """Convert a number or a name."""
    match word.unit.split():
        case ["positive"]:  # 0, -1 and false mean that nothing is set
            if not isinstance(value, int | float) or value > 0:
                return value
            return {} if value in (0, -1) else Reason("It must be greater than 0.")
        case ["inverse"]:
            return 1 / value
        case ["times", *keys]:
            factors = [known.get(key) for key in keys]
            numbers = [factor for factor in factors if factor and isinstance(factor, int | float)]
            if len(numbers) < len(keys):
                return Reason(
                    f"It is multiplied by {' and '.join(keys)}, which the config does not set."
                )
            product = (value + 0) * math.prod(numbers)  # text plus 0 is an error
            return product if isinstance(numbers[0], float) else round(product)
        case ["half", index]:  # of both betas
            betas = [*known.get(word.key, (0.9, 0.95))]
            betas[int(index)] = value
            return betas
        case ["of_head"]:  # a share of its components, an even number of them
            width, heads = known.get("model.d_model"), known.get("model.num_heads")
            size = known.get("model.head_dim") or (width // heads if width and heads else None)
            if not size:
                return Reason("It is a share of a head whose size is not set.")
            return round((value + 0) * (size + 0) / 2) * 2
        case ["scales"]:  # a list or text states them; a switch may turn them off
            parts = re.findall(r"\d+", value) if isinstance(value, str) else value
            return {f"~{word.key}": [int(part) for part in parts]}
        case ["name", noun, *listed]:
            first = str(value[0] if isinstance(value, list) and value else value)
            text = OF_A_CLASS.sub("", first.rpartition(".")[2].lower())
            names = listed or REGISTRIES[noun].names()
            found = text if text in names else name_for(noun, text, names)
            found = found or value_for(word.key, text)
            if found is None:
                return Reason(f"There is no {noun} {first}. flatout has {', '.join(names)}.")
            if noun == "schedule" and found == "linear" and known.get("schedule.decay", 1) < 1:
                found = "wsd"  # a line that starts late
            return {word.key: found} | ({"speedups": "+adamw-8bit"} if "8bit" in text else {})
        case ["loggers"]:
            given = [str(one).lower() for one in (value if isinstance(value, list) else [value])]
            names = LOGGERS.names()
            there = [one for one in given if one in names]
            if "all" in given:
                return {}
            if there or all(map(is_off, given)):
                return there
            return Reason(f"There is no logger {', '.join(given)}. flatout has {', '.join(names)}.")
        case ["targets"]:
            return _targets(value, word, known)
        case ["weights"]:  # ORG/NAME is a repository of the hub
            text = LITGPT.sub("", str(value))
            is_on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text)
            return f"{HUB}{text}" if is_on_hub and not text.endswith(".pt") else text
        case ["shape"]:
            return _shape(value, word, known)
        case _:
            return _of_the_run(value, word, known)


def _targets(value: Any, word: Word, known: Known) -> Any:
    """Return the names of the layers, which litgpt's switches choose. The output has no adapter."""
    given = value if isinstance(value, list) else str(value).split(",")
    if "lora_query" in word.names:
        given = [
            one for one in word.names if not is_off(known.get(f"{THEIRS}{one}", one in LITGPT_ON))
        ]
    names = [str(one).strip().rpartition(".")[2] for one in given]
    meant = ", ".join(value_for(word.key, one) or one for one in names if one not in OUTPUT)
    if not meant:
        return Reason("Only linear layers of the blocks have adapters.")
    return [*dict.fromkeys(meant.split(", "))]


def _shape(value: Any, word: Word, known: Known) -> Any:
    """Return the shape that a model's name stands for, or torchtitan's names of it and its size."""
    model = str(value)
    if "flavor" in word.names:
        model = f"{known.get(f'{THEIRS}model.name')}_{value}"
    elif any(key.startswith(f"{THEIRS}model_config.") for key in known):
        return Unneeded("The keys of model_config set the shape.")
    elif f"{THEIRS}model.flavor" in known:
        return Unneeded("model.flavor sets the shape with it.")
    keys = dict(shape_for(model) or {})
    if not keys:
        return Reason(
            f"The name {model} does not determine a shape: set the keys of model, or start from a "
            "recipe that `flatout list recipes` shows."
        )
    note, recipe = keys.pop("note", ""), keys.pop("recipe", None)
    if recipe:
        keys = RECIPES.get(recipe)["model"] | keys
    found = {f"~model.{key}": one for key, one in keys.items()} | {"": note}
    return found | ({"~data.seq_len": keys["max_seq_len"]} if "max_seq_len" in keys else {})


def _of_the_run(value: Any, word: Word, known: Known) -> Any:
    """Convert a length, an interval or a point of the run."""
    total, is_constant = known.get("train.steps"), known.get("schedule.kind") == "constant"
    match word.unit.split():
        case ["steps", in_epochs, strategy, *or_epochs]:
            # A fraction below 1 is a share of the run, perhaps in epochs. With `or_epochs`, it
            # counts epochs if the run does, and is long enough.
            if not isinstance(value, int | float) or value <= 0:
                return {}
            epochs = None if "train.tokens" in known or total else known.get("train.epochs")
            if or_epochs and epochs and value <= epochs:
                return {in_epochs: value}
            if known.get(f"{THEIRS}{strategy}") == "epoch":
                return Unneeded(f"{strategy}=epoch counts epochs instead.")
            if value >= 1:
                return round(value)
            if total:
                return max(1, round(value * (total + 0)))
            if epochs:
                return {in_epochs: value * epochs}
            return Reason("It is a share of an unknown length.")
        case ["compress"]:
            if known.get("checkpoint.upload"):
                return "zstd"
            return Unneeded("Only uploaded checkpoints (checkpoint.upload) are compressed.")
        case ["eval_strategy"]:  # as many steps as between log records is the Trainer's default
            stated = known.keys() & {f"{THEIRS}eval_steps", "train.eval_every", word.key}
            if value == "steps" and not stated and "log.every" in known:
                return {"~train.eval_every": known["log.every"]}
            return Unneeded("eval_steps counts them.")
        case ["warmup", *share]:  # steps or a fraction; 0 may leave it to another key
            if share and not 0 <= value < 1:
                return Reason("A share of the run is below 1.")
            if is_constant and known.get(word.key) == 0:
                return Unneeded("The rate is constant from the first step on.")
            value = round(value) if isinstance(value, float) and value >= 1 else value
            return value or {f"~{word.key}": 0}
        case ["decay_end"]:
            if is_constant:
                return Unneeded("The rate is constant.")
            if value == total:
                return Unneeded("The decay ends with the run.")
            if not total:
                return Reason("The decay ends with the run, whose length in steps is not set.")
            shorter = f" train.steps={value} ends both there." if value < total else ""
            return Reason(
                f"The decay ends with the run, at step {total}, not at step {value}.{shorter}"
            )
        case _:
            return _of_the_data(value, word, known)


def _of_the_data(value: Any, word: Word, known: Known) -> Any:
    """Convert what describes the data, and options of `flatout prepare`."""
    form = known.get(f"{THEIRS}datasets.type")  # Axolotl's name for the form of rows
    form = None if form is None else str(form).partition(".")[0]
    match word.unit.split():
        case ["packing"]:  # attention stays within each document, but not in TRL's `wrapped`
            return known.get(f"{THEIRS}packing_strategy") != "wrapped"
        case ["dataset"]:
            return _dataset(value, known)
        case ["mix"]:
            if isinstance(value, list) and len(value) == 1:
                return _dataset(
                    value[0].get("path") if isinstance(value[0], dict) else value[0], known
                )
            found = {
                path["data.path"]: weight
                for title, weight in (value.items() if isinstance(value, dict) else ())
                if isinstance(path := _dataset(title, known), dict)
                and isinstance(weight, int | float)
            }
            if found and len(found) == len(value):
                return {word.key: found}
            return Reason(
                "Prepare each dataset with `flatout prepare`, and set data.mix='{data/a: 3, "
                "data/b: 1}'."
            )
        case ["hub_config"]:  # the source names it
            if any(ON_HUB.fullmatch(str(one)) for one in _hub_names(known)):
                return Unneeded("The source of `flatout prepare` names it.")
            return Reason(
                "`flatout prepare hub:ORG/NAME:config=CONFIG` reads it. The dataset has no "
                "ORG/NAME."
            )
        case ["as_option"]:  # a field, a file or another text
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            return one if isinstance(one, str) else Reason(f"{word.option} takes a name.")
        case ["tokenizer"]:
            text = LITGPT.sub("", str(value))
            return name_for("tokenizer", text, TOKENIZERS) or text
        case ["template"]:
            if form not in {None, *CONVERSATIONS}:
                return Unneeded("The rows are not chat data.")
            text = str(value).replace("tokenizer_default", "auto")
            if text in ("auto", "chatml", "plain") or text.endswith((".jinja", ".jinja2")):
                return text
            return Reason(
                f"There is no template {text}: `{word.option} auto` takes that of the tokenizer."
            )
        case ["trained_inputs", *inverted]:
            is_trained = is_off(value) == bool(inverted)
            if form in CONVERSATIONS:
                turns = "With --chat, the loss counts the assistant's turns"
                return Reason(f"{turns} and nothing else.") if is_trained else Unneeded(f"{turns}.")
            if is_trained or form in TEXTS:
                return Unneeded("The loss counts all of the text.")
            return Reason(
                f"`flatout prepare {word.option} FIELD` omits the prompt of each row. Name "
                "its field."
            )
    raise KeyError(word.unit)


def _hub_names(known: Known) -> list[Any]:
    """Return what may name a dataset of the hub."""
    return [known.get(f"{THEIRS}{key}") for key in ("datasets.path", "dataset_name")]


def _dataset(value: Any, known: Known) -> Any:
    """Return the directory to prepare a dataset in, and its source."""
    if not isinstance(value, str) or not value.strip("./ "):
        return Reason("Prepare the data with `flatout prepare`, and set data.path.")
    last = value.rstrip("/").rpartition("/")[2].rpartition("data.")[2].lower()
    configs = (known.get(f"{THEIRS}{key}") for key in ("dataset_config_name", "datasets.name"))
    config = next(filter(None, configs), None)
    title = name_for("dataset", last, DATASETS.names()) or last
    if config is not None:  # wikitext has wikitext-2 and wikitext-103
        title = str(config) if str(config).startswith(last) else f"{last}-{config}"
    found: JsonObject = {"data.path": f"data/{re.sub(r'[^a-z0-9.]+', '-', title).strip('-')}"}
    if last.endswith("_char"):
        found["~--tokenizer"] = "char"
    if title in DATASETS.names():
        found[f"~{SOURCE}"] = title
    elif Path(value).suffix in FILES or Path(value).is_file():
        found[f"~{SOURCE}"] = value
    elif value in _hub_names(known) and ON_HUB.fullmatch(value):
        found[f"~{SOURCE}"] = f"hub:{value}" + (f":config={config}" if config else "")
    return found
