"""Converts another tool's config: every key is mapped, unnecessary, missing here, or unknown.

The config is a file of values, or a Python file that assigns them, which is parsed and never
executed: assignments of literals and of arithmetic on numbers are read.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flatout.config.documents import parse_yaml, read_text
from flatout.config.messages import fields_of
from flatout.config.registry import MODELS
from flatout.config.schema import ALTERNATIVES, MAPPINGS, RunConfig, nested, validate
from flatout.config.units import SOURCE, THEIRS, Reason, Refused, Unneeded, converted, is_off
from flatout.config.words import Tool, Word, tools, word_for
from flatout.errors import ConfigError
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject

Outcome = Literal["mapped", "unnecessary", "missing", "unknown"]
UNKNOWN, NO_TOOL = Word((), "unknown"), Tool("", frozenset())
COMPUTED = "It is computed, and code is not executed."
FOLLOWS = "It is a factor of batch.tokens_per_step."
PREFERRED = (
    "train.steps",
    "train.tokens",
    "train.epochs",
    "train.eval_every_epochs",
    "checkpoint.every_epochs",
    "checkpoint.every_minutes",
    "train.eval_every",
    "checkpoint.every_steps",
    "data.path",
    "data.mix",
)
"""Of alternative keys, the one that other tools let win comes first."""
SECRETS = ("hub_token", "api_key", "password", "secret")
"""Ends of keys whose values are not repeated."""
EVERY_MODEL = {"model.kind", "model.vocab_size", "model.logit_softcap", "model.z_loss"}
BESIDE_WEIGHTS = {"model.kind", "model.dropout", "model.z_loss", "model.chunk_size"}
"""Keys of the model that stay beside train.init_from. The weights define their shape."""
DEPENDENT = ("schedule.min_lr", "train.patience", "lora.alpha", "lora.dropout", "lora.targets")
"""Keys that are valid only beside others."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
"""Arithmetic that a Python file may contain. Powers are omitted, since they can be very large."""


class Item(Stored):
    """What became of one key."""

    key: str
    """The key, dotted if it is in a section."""
    value: Any
    """Its value. Null when it is computed."""
    outcome: Outcome
    """mapped, unnecessary (nothing to set), missing (no counterpart), or unknown."""
    becomes: JsonObject = Field(default_factory=dict)
    """The keys of flatout and their values."""
    why: str = ""
    """Why it has no counterpart, or what to know about it."""


@dataclass
class Conversion:
    """A config of another tool in the words of flatout."""

    tool: Tool | None
    """The tool, if it was recognised."""
    items: list[Item]
    """Every key, in the order of the file."""
    defaults: JsonObject
    """The tool's own defaults that were added, by its key."""
    values: JsonObject
    """Values of flatout by dotted key."""
    options: JsonObject
    """Options of `flatout prepare`, and SOURCE, its argument."""


def read_settings(path: Path) -> tuple[JsonObject, list[str]]:
    """Return the values in a YAML, JSON, TOML or Python file, and the names of computed ones.

    Raises: ConfigError when the file cannot be read or is not a mapping.
    """
    text, kind = read_text(path, "a config"), path.suffix.lower()
    parsers: dict[str, Any] = {".py": ast.parse, ".json": json.loads, ".toml": tomllib.loads}
    parse = parsers.get(kind, partial(parse_yaml, name=str(path)))
    try:
        document = parse(text)
    except (ValueError, SyntaxError, RecursionError) as error:
        name = "Python" if kind == ".py" else kind[1:].upper()
        raise ConfigError(
            f"{path} is not valid {name}: {error}.", fix="Correct it there."
        ) from error
    if isinstance(document, ast.Module):
        return _python_values(document)
    if not isinstance(document, dict) or not document:
        raise ConfigError(
            f"{path} is not a mapping of keys to values.",
            fix="Name the config of another tool: YAML, JSON, TOML, or a Python file that assigns "
            "values.",
        )
    return document, []


def _python_values(tree: ast.Module) -> tuple[JsonObject, list[str]]:
    values: JsonObject = {}
    computed = []
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                try:
                    values[target.id] = _literal(node.value)
                except (ValueError, TypeError, ArithmeticError):
                    computed.append(target.id)
    return values, computed


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of arithmetic on numbers.

    Raises: ValueError for anything else.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return OPERATORS[type(node.op)](left, right)
    value = ast.literal_eval(node)
    json.dumps(value)  # bytes, sets and complex numbers have no place in a config
    return value


def convert(document: JsonObject, computed: list[str]) -> Conversion:
    """Convert the values of a config. `computed` names keys whose values are unknown."""
    flat = dict(_flat(document))
    # The tool that most keys belong to. Of two with as many, the one with a default for more.
    tool = max(
        tools(), key=lambda tool: (len(tool.keys & flat.keys()), len(flat.keys() & tool.defaults))
    )
    if len(tool.keys & flat.keys()) < 2:
        tool = NO_TOOL
    entries = [
        _Entry(key, value, word_for(tool.renames.get(key, key)) or UNKNOWN)
        for key, value in flat.items()
    ]
    entries += _defaults(tool, entries, computed)
    reading = _Reading(tool, {f"{THEIRS}{key}": value for key, value in flat.items()})
    for entry in sorted(entries, key=lambda one: one.word.turn):
        reading.read(entry)
    values, options = reading.finish()
    items, defaults = [], {}
    for entry in entries:
        item = reading.item(entry)
        if not entry.is_default or item.outcome == "missing":
            items.append(item)
        elif item.outcome == "mapped":
            defaults[entry.key] = entry.value
    for key in computed:
        word = word_for(key)
        why = f"{COMPUTED} Set {word.key}." if word and word.key else COMPUTED
        items.append(Item(key=key, value=None, outcome="unknown", why=why))
    return Conversion(tool if tool.name else None, items, defaults, values, options)


def _flat(document: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values. A section without a counterpart is one key."""
    for key, value in document.items():
        word = word_for(f"{prefix}{key}")
        as_one = word is not None and (not word.key or word.key in MAPPINGS)
        if key == "datasets" and isinstance(value, list):
            forms = [one.get("type") if isinstance(one, dict) else None for one in value]
            if len(value) == 1 and isinstance(value[0], dict):
                as_one, value = False, value[0]  # Axolotl's list of one
            elif forms and forms[0] and all(form == forms[0] for form in forms):
                yield f"{prefix}datasets.type", forms[0]
        if isinstance(value, dict) and value and not as_one:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass
class _Entry:
    """One key of the file, or one of the tool's defaults."""

    key: str
    value: Any
    word: Word
    is_default: bool = False
    wrote: JsonObject = field(default_factory=dict)
    """The values of flatout that it asked for."""
    why: str = ""


def _defaults(tool: Tool, entries: list[_Entry], computed: list[str]) -> Iterator[_Entry]:
    """Yield the tool's defaults that no key states, with a value or computed."""
    words = [one.word for one in entries if one.value is not None and one.value != -1]
    stated = {word.key for word in words} - {""}
    sections = {one.key.rpartition(".")[0] for one in entries}
    has_adapters = not tool.adapters or any(
        one.key == tool.adapters and not is_off(one.value) for one in entries
    )
    for key, value in tool.defaults.items():
        word, section = word_for(key) or UNKNOWN, key.rpartition(".")[0]
        rivals = _alternatives(word.key) - {"optim.betas"}  # half of it may be stated
        is_free = key not in computed and word not in words and not stated & rivals
        is_free &= section != tool.optional or section in sections
        if is_free and (has_adapters or "lora." not in word.key):
            yield _Entry(key, value, word, is_default=True)


def _alternatives(key: str) -> set[str]:
    return next((group for group in ALTERNATIVES if key in group), {key})


def _rank(key: str) -> tuple[bool, int]:
    """Return the place of a key in the order in which keys are tried: the first one stays."""
    return key in DEPENDENT, PREFERRED.index(key) if key in PREFERRED else -1


class _Reading:
    """Collects values of flatout, each from the first key that states it."""

    def __init__(self, tool: Tool, theirs: JsonObject) -> None:
        self._tool, self._theirs = tool, theirs
        self._values: JsonObject = {}
        self._implied: JsonObject = {}
        self._dropped: dict[str, str] = {}
        """Why a key of flatout was omitted again."""

    def read(self, entry: _Entry) -> None:
        """Convert one entry, and keep what no earlier one has set."""
        word, value, values = entry.word, entry.value, self._values
        if value is None or not (word.key or word.cases or word.unit):
            return
        known = fields_of(RunConfig).get(word.key)
        is_text = known is not None and not re.search(r"\b(int|float)\b", str(known.annotation))
        if not is_text and isinstance(value, str) and NUMBER.fullmatch(value):  # a quoted number
            value = float(value) if re.search(r"[.eE]", value) else int(value)
        result = converted(value, word, self._theirs | self._implied | values)
        if isinstance(result, Refused):
            raise ConfigError(
                f"{entry.key}={entry.value!r} {result}.",
                fix="Convert the config of a training on text or chat data.",
            )
        if isinstance(result, Reason):
            entry.why = result
            return
        for key, one in result.items():
            if not key:
                entry.why = one
            elif key.startswith("~"):
                self._implied.setdefault(key[1:], one)
                entry.wrote[key[1:]] = one
            elif key == "speedups":
                edits = values.setdefault(key, "auto").split(",")
                values[key] = ",".join(dict.fromkeys([*edits, one]))
                entry.wrote[key] = one
            elif key == "optim.betas" or values.setdefault(key, one) == one:
                values[key] = entry.wrote[key] = one
            else:
                entry.why = f"{key}={values[key]} is already set."

    def finish(self) -> tuple[JsonObject, JsonObject]:
        """Return all values, without contradictions, as `RunConfig` accepts them, and the options
        of `flatout prepare`.
        """
        values, tool = self._values, self._tool
        for key, value in {**tool.implies, **self._implied}.items():
            if not _alternatives(key) & values.keys():
                values[key] = value
        # keys that another key makes irrelevant
        if tool.adapters and is_off(self._theirs.get(f"{THEIRS}{tool.adapters}")):
            why = f"Without {tool.adapters}, there are no adapters."
            self._drop(self._keys_of("lora"), Unneeded(why))
        if "train.init_from" in values:
            why = "The shape is that of the weights which train.init_from names."
            self._drop(self._keys_of("model") - BESIDE_WEIGHTS, Unneeded(why))
        kind = values.get("schedule.kind", "wsd")
        if kind == "constant":
            self._drop(["schedule.min_lr"], Unneeded("The rate is constant."))
        if kind != "wsd":
            whole = values.get("schedule.decay") == 1
            only_wsd = "Only schedule.kind=wsd keeps the rate before it falls."
            late = Unneeded("The decay starts after the warm-up.") if whole else only_wsd
            self._drop(["schedule.decay"], late)
        if {"model.num_eigenstates", "model.scales", "model.chunk_size"} & values.keys():
            values.setdefault("model.kind", "eigenstate")
        sizes = [
            values.get(key) for key in ("batch.rows_per_device", "batch.accumulate", "data.seq_len")
        ]
        factors = [size for size in sizes if isinstance(size, int)]
        if tool.accumulate_over_devices and factors == sizes:
            values.setdefault("batch.tokens_per_step", math.prod(factors))
        if "batch.tokens_per_step" in values and sizes[0] is not None:
            self._drop(["batch.accumulate"], FOLLOWS)
        model = values.get("model.kind", "transformer")
        own = {key.removeprefix("model.") for key in self._keys_of("model") - EVERY_MODEL}
        unknown = (f"model.{name}" for name in MODELS.unstated(model, own))
        self._drop(unknown, f"The model {model} has no such key.")
        options = {key: values[key] for key in values if key.startswith(("--", SOURCE))}
        kept: JsonObject = {}
        keys = [key for key in values if key not in options]
        for key in sorted(keys, key=_rank):
            rivals = _alternatives(key) & kept.keys()
            try:
                validate(nested({**kept, key: values[key]}))
            except ConfigError as error:
                self._dropped[key] = f"{rivals.pop()} is set." if rivals else error.what
            else:
                kept[key] = values[key]
        order = [*RunConfig.model_fields]
        return {
            key: kept[key]
            for key in sorted(kept, key=lambda key: order.index(key.partition(".")[0]))
        }, options

    def _keys_of(self, section: str) -> set[str]:
        return {key for key in self._values if key.startswith(f"{section}.")}

    def _drop(self, keys: Iterable[str], why: str) -> None:
        for key in keys:
            if self._values.pop(key, None) is not None:
                self._dropped[key] = why

    def item(self, entry: _Entry) -> Item:
        """Return what became of an entry."""
        word, values, value = entry.word, self._values, entry.value
        joint = ("speedups", "optim.betas")  # several keys write them
        becomes = {
            key: values.get(key) if key == "optim.betas" else one
            for key, one in entry.wrote.items()
            if key not in self._dropped and (key in joint or values.get(key) == one)
        }
        lost = next((self._dropped[key] for key in entry.wrote if key in self._dropped), "")
        why, nothing = entry.why or lost, 1 if word.group == "missing" else -1
        outcome: Outcome = "unnecessary"
        if value is None:
            why = "It is not set."
        elif word is UNKNOWN:
            outcome, why = "unknown", "flatout does not know it."
        elif becomes or lost == FOLLOWS:
            outcome = "mapped"
        elif why:
            outcome = "unnecessary" if isinstance(why, Unneeded) else "missing"
        elif word.group == "left_out":
            why = word.note
        elif is_off(value) or (value == nothing and value is not True):
            why = "It is off."
        elif word.group == "missing":
            outcome, why = "missing", word.note
        elif word.group == "prepare":
            outcome, why = "missing" if word.option else "unnecessary", word.advice
        else:
            why = "Another key sets it." if entry.wrote else "flatout does this by default."
        if entry.is_default:
            why += " It is the tool's default."
        shown = "(hidden)" if entry.key.endswith(SECRETS) else value
        return Item(key=entry.key, value=shown, outcome=outcome, becomes=becomes, why=why)
