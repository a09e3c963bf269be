"""Units of the dataset and its preparation, whose keys are options of `flatout prepare`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.config.units.base import LITGPT, SOURCE, THEIRS, Unneeded, is_off, late, unit
from flatout.json_io import JsonObject
from flatout.registry import DATASETS
from flatout.words import name_for

TYPE = f"{THEIRS}datasets.type"
"""Axolotl's name for the form of rows."""
CONVERSATIONS = {"chat_template", "sharegpt", "chat"}
TEXTS = {"completion", "pretrain"}
"""Forms of rows in Axolotl."""
FILES = {".jsonl", ".json", ".parquet", ".csv", ".txt"}
ON_HUB = (f"{THEIRS}datasets.path", f"{THEIRS}dataset_name")
"""Keys whose ORG/NAME is a dataset of the Hugging Face hub."""
TOKENIZERS = ("openai-community/gpt2", "char", "byte", "train:4096")
"""What names of tokenizers elsewhere stand for."""


ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""ORG/NAME."""
CONFIGS = (f"{THEIRS}dataset_config_name", f"{THEIRS}datasets.name")
"""Keys that name a part of a dataset of the hub."""


@unit
def hub_config(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return that the source names the configuration, which needs the dataset's full name."""
    if any(ON_THE_HUB.fullmatch(str(known.get(name))) for name in ON_HUB):
        return Unneeded("The source of `flatout prepare` names it.")
    return "`flatout prepare hub:ORG/NAME:config=CONFIG` reads it; the dataset has no ORG/NAME."


@unit
def dataset(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the directory to prepare a dataset in."""
    if not isinstance(value, str) or not value.strip("./ "):
        return "Prepare the data with `flatout prepare`, and set data.path."
    last = value.rstrip("/").rpartition("/")[2].rpartition("data.")[2].lower()
    config = next((known[one] for one in CONFIGS if known.get(one)), None)
    name = name_for("dataset", last, DATASETS.names()) or last
    if config is not None:  # wikitext has wikitext-2 and wikitext-103
        name = str(config) if str(config).startswith(last) else f"{last}-{config}"
    found: JsonObject = {key: f"data/{re.sub(r'[^a-z0-9.]+', '-', name).strip('-')}"}
    if last.endswith("_char"):
        found["~--tokenizer"] = "char"
    if name in DATASETS.names():
        found[f"~{SOURCE}"] = name
    elif Path(value).suffix in FILES or Path(value).is_file():
        found[f"~{SOURCE}"] = value
    elif value in map(known.get, ON_HUB) and ON_THE_HUB.fullmatch(value):
        found[f"~{SOURCE}"] = f"hub:{value}" + (f":config={config}" if config else "")
    return found


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
def as_option(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a field, a file or another text as it is."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return {option: one} if isinstance(one, str) else f"{option} takes a name."


@unit
def count(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a number; numbers below 1 mean that there is no limit."""
    if is_off(value) or value == -1:
        return {}
    is_count = isinstance(value, int) and value is not True
    return {option: value} if is_count else f"{option} takes a number."


@unit
def out(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return that the recipe names the directory."""
    return Unneeded("data.path names the directory that `flatout prepare` writes.")


@unit
def class_name(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return that a class does not matter."""
    return Unneeded(f"{option} names a file or a repository, not a class.")


@unit
def tokenizer(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the tokenizer, which may have another name here."""
    name = re.sub(LITGPT, "", str(value))
    return {option: name_for("tokenizer", name, TOKENIZERS) or name}


@unit
def hash_split(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the share of documents that validation gets."""
    if is_off(value):
        return Unneeded("Training always holds out validation text; --split sets its share.")
    if isinstance(value, float) and value < 1:
        return {option: f"hash {value:g}"}
    return f"It counts rows, and {option} takes a share of the documents, such as 'hash 0.05'."


@unit
def hub_split(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the reason why a split must be written by hand, except train."""
    if value == "train":
        return Unneeded("hub:ORG/NAME reads the split train.")
    return f"`flatout prepare hub:ORG/NAME:split={value}` reads that split."


@unit
def rows(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the option for conversations; formats of prompts have no counterpart."""
    form = str(value).partition(".")[0] if isinstance(value, str) else ""
    if form in CONVERSATIONS:
        return {f"~{option}": "auto"}
    if form in TEXTS:
        return Unneeded("`flatout prepare` reads rows of text.")
    return (
        "There are no formats of prompts: write each row's prompt and answer as a conversation, "
        "for --chat, or as two fields, for --mask-field and --text-field."
    )


@late
def template(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the chat template, if the rows are conversations."""
    form = str(known.get(TYPE, "chat_template")).partition(".")[0]
    if form not in CONVERSATIONS:
        return Unneeded("The rows are not conversations.")
    name = str(value)
    if name in ("auto", "chatml", "plain") or name.endswith((".jinja", ".jinja2")):
        return {option: name}
    if name == "tokenizer_default":
        return {option: "auto"}
    return f"There is no template {name}: `{option} auto` takes that of the tokenizer."


@unit
def trained_inputs(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return what the loss counts: all of a text, or the assistant's turns of a conversation."""
    form = str(known.get(TYPE)).partition(".")[0]
    if form in CONVERSATIONS:
        if is_off(value):
            return Unneeded("With --chat, the loss counts the assistant's turns.")
        return "With --chat, the loss counts the assistant's turns and nothing else."
    if not is_off(value) or form in TEXTS:
        return Unneeded("The loss counts all of the text.")
    return f"`flatout prepare {option} FIELD` leaves the prompt of each row out; name its field."


@unit
def masked_inputs(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return what the loss counts, from the opposite of `train_on_inputs`."""
    return trained_inputs(is_off(value), option, known)


@unit
def duplicates(value: Any, option: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return whether duplicates are dropped."""
    return {} if is_off(value) else {option: "drop"}
