"""Converts the config of another tool: every key is mapped, unnecessary, missing here, or unknown.

Files are parsed and never executed: of a Python file, assignments of literals and of arithmetic on
numbers are read.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flatout.config.overrides import nested
from flatout.config.schema import ALTERNATIVES, MAPPINGS, RunConfig, validate
from flatout.config.units import LATE, UNITS, is_off
from flatout.documents import parse_yaml, read_text
from flatout.errors import ConfigError
from flatout.json_io import JsonObject, Stored
from flatout.registry import MODELS
from flatout.words import Tool, Word, tools, word_for

Outcome = Literal["mapped", "unnecessary", "missing", "unknown"]
COMPUTED = "It is computed, and code is not executed."
FOLLOWS = "It is a factor of batch.tokens_per_step."
PREFERRED = (
    "train.steps",
    "train.tokens",
    "train.epochs",
    "train.eval_every_epochs",
    "checkpoint.every_epochs",
    "checkpoint.every_minutes",
    "checkpoint.every_steps",
    "data.path",
    "data.mix",
)
"""Of alternative keys, the one that other tools let win comes first."""
SECRETS, HIDDEN = ("hub_token", "api_key", "password", "secret"), "(hidden)"
"""Ends of keys whose values are not repeated, and what is shown instead."""
EVERY_MODEL = {"model.kind", "model.vocab_size", "model.logit_softcap", "model.z_loss"}
OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
"""Arithmetic that a Python file may contain; powers are left out, since they can be very large."""


class Item(Stored):
    """What became of one key."""

    key: str
    """The key, dotted if it is in a section."""
    value: Any
    """Its value; null when it is computed."""
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
    items: list[Item] = field(default_factory=list)
    """Every key, in the order of the file."""
    defaults: JsonObject = field(default_factory=dict)
    """The tool's own defaults that were added, by its key."""
    values: JsonObject = field(default_factory=dict)
    """Values of flatout by dotted key."""


def read_settings(path: Path) -> tuple[JsonObject, list[str]]:
    """Return the values in a YAML, JSON, TOML or Python file, and the names of computed ones.

    Raises: ConfigError when the file cannot be read or is not a mapping.
    """
    text, kind = read_text(path, "a config"), path.suffix.lower()
    try:
        if kind == ".py":
            return _python_values(text)
        document = (
            json.loads(text)
            if kind == ".json"
            else tomllib.loads(text)
            if kind == ".toml"
            else parse_yaml(text, name=str(path))
        )
    except (ValueError, SyntaxError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid {kind[1:].upper() if kind != '.py' else 'Python'}: {error}.",
            fix="Correct it there.",
        ) from error
    if not isinstance(document, dict) or not document:
        raise ConfigError(
            f"{path} is not a mapping of keys to values.",
            fix="Name the config of another tool: YAML, JSON, TOML, or a Python file that assigns "
            "values.",
        )
    return document, []


def _python_values(text: str) -> tuple[JsonObject, list[str]]:
    values: JsonObject = {}
    computed: list[str] = []
    targets: list[ast.expr]
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if not isinstance(target, ast.Name) or target.id.startswith("_"):
                continue
            try:
                values[target.id] = _literal(value)
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
    """Convert the values of a config; `computed` names keys whose values are unknown."""
    flat = dict(_flat(document))
    found = Conversion(_tool_of(set(flat)))
    entries = [_Entry(key, value, word_for(key)) for key, value in flat.items()]
    used = {(one.key_of, one.unit) for one in entries if one.value is not None and one.value != -1}
    stated = {key for key, _ in used}
    for key, value in (found.tool.defaults if found.tool else {}).items():
        entry = _Entry(key, value, word_for(key), is_default=True)
        rivals = {other for group in ALTERNATIVES if entry.key_of in group for other in group}
        shared = {entry.key_of} - {"optim.betas"}  # half of it may be stated
        if (entry.key_of, entry.unit) not in used and not stated & (rivals | shared):
            entries.append(entry)
            found.defaults[key] = value
    reading = _Reading()
    for late in (False, True):
        for entry in entries:
            if (entry.unit in LATE) is late:
                reading.read(entry)
    found.values = reading.finish(found.tool)
    found.items = [reading.item(entry) for entry in entries if not entry.is_default]
    found.items += [_computed(key) for key in computed]
    return found


def _computed(key: str) -> Item:
    word = word_for(key)
    why = f"{COMPUTED} Set {word.key}." if word and word.key else COMPUTED
    return Item(key=key, value=None, outcome="unknown", why=why)


def _flat(document: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values; a section without a counterpart is one key."""
    for key, value in document.items():
        word = word_for(f"{prefix}{key}")
        as_one = word is not None and (not word.key or word.key in MAPPINGS)
        if isinstance(value, dict) and value and not as_one:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _tool_of(keys: set[str]) -> Tool | None:
    """Return the tool that most keys belong to; one key alone says nothing."""
    best = max(tools(), key=lambda tool: len(tool.keys & keys))
    return best if len(best.keys & keys) > 1 else None


@dataclass(eq=False)
class _Entry:
    """One key of the file, or one of the tool's defaults."""

    key: str
    value: Any
    word: Word | None
    is_default: bool = False
    wrote: JsonObject = field(default_factory=dict)
    """The values of flatout that it asked for."""
    why: str = ""

    @property
    def unit(self) -> str:
        return self.word.unit.partition(" ")[0] if self.word else ""

    @property
    def key_of(self) -> str:
        return self.word.key if self.word else ""


def _preference(key: str) -> int:
    return PREFERRED.index(key) if key in PREFERRED else len(PREFERRED)


def _as_it_is(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject:
    """Return the value unchanged: the key without a unit."""
    return {key: value}


class _Reading:
    """Collects values of flatout, each from the first key that states it."""

    def __init__(self) -> None:
        self._values: JsonObject = {}
        self._implied: JsonObject = {}
        self._speedups: list[str] = []
        self._dropped: dict[str, str] = {}
        """Why a key of flatout was left out again."""

    def read(self, entry: _Entry) -> None:
        """Convert one entry, and keep what no earlier one has set."""
        word = entry.word
        if word is None or not word.key or entry.value is None:
            return
        _, _, argument = word.unit.partition(" ")
        convert_value = UNITS.get(entry.unit, _as_it_is)
        try:
            result = convert_value(entry.value, argument or word.key, self._implied | self._values)
        except (TypeError, ValueError, ArithmeticError):
            result = f"The value {entry.value!r} cannot be converted."
        if isinstance(result, str):
            entry.why = result
            return
        for key, value in result.items():
            if key == "speedups":
                self._speedups.append(value)
            elif key.startswith("~"):
                self._implied.setdefault(key[1:], value)
            elif self._values.setdefault(key, value) != value and key != "optim.betas":
                entry.why = f"{key}={self._values[key]} is already set."
                continue
            else:
                self._values[key] = value
            entry.wrote[key.lstrip("~")] = value

    def finish(self, tool: Tool | None) -> JsonObject:
        """Return all values, without contradictions, as `RunConfig` accepts them."""
        values = self._values
        for key, value in {**self._implied, **(tool.implies if tool else {})}.items():
            group = next((group for group in ALTERNATIVES if key in group), {key})
            if not group & values.keys():
                values[key] = value
        recurrent = {"model.num_eigenstates", "model.scales", "model.chunk_size"} & values.keys()
        if recurrent and "model.kind" not in values:
            values["model.kind"] = "eigenstate"
        self._two_batch_sizes(tool)
        for group in ALTERNATIVES:
            for key in sorted(group & values.keys(), key=_preference)[1:]:
                first = min(group & values.keys(), key=_preference)
                self._drop(key, f"{first} is set.")
        own = {key for key in values if key.startswith("model.")} - EVERY_MODEL
        model = values.get("model.kind", "transformer")
        for field_name in MODELS.unstated(model, {key.removeprefix("model.") for key in own}):
            self._drop(f"model.{field_name}", f"The model {model} has no such key.")
        if self._speedups:
            values["speedups"] = ",".join(["auto", *dict.fromkeys(self._speedups)])
        return self._valid(values)

    def _two_batch_sizes(self, tool: Tool | None) -> None:
        """Leave two of the three sizes of a batch; the third follows."""
        values = self._values
        sizes = ("batch.rows_per_device", "batch.accumulate", "data.seq_len")
        factors = [size for key in sizes if isinstance(size := values.get(key), int)]
        if tool and tool.accumulate_over_devices and len(factors) == len(sizes):
            values.setdefault("batch.tokens_per_step", math.prod(factors))
        if "batch.tokens_per_step" in values and values.get("batch.rows_per_device") is not None:
            self._drop("batch.accumulate", FOLLOWS)

    def _drop(self, key: str, why: str) -> None:
        if self._values.pop(key, None) is not None:
            self._dropped[key] = why

    def _valid(self, values: JsonObject) -> JsonObject:
        """Return the values that are valid, alone and together."""
        kept: JsonObject = {}
        last = ("schedule.min_lr", "train.patience", "lora.alpha", "lora.dropout", "lora.targets")
        for key in sorted(values, key=lambda key: key in last):
            try:
                validate(nested({**kept, key: values[key]}))
            except ConfigError as error:
                self._dropped[key] = error.what
            else:
                kept[key] = values[key]
        order = {name: number for number, name in enumerate(RunConfig.model_fields)}
        return dict(sorted(kept.items(), key=lambda item: order[item[0].partition(".")[0]]))

    def item(self, entry: _Entry) -> Item:
        """Return what became of an entry."""
        word, values = entry.word, self._values
        becomes = {
            key: values.get(key) if key == "optim.betas" else value
            for key, value in entry.wrote.items()
            if key == "speedups" or (key not in self._dropped and values.get(key) is not None)
            if key in ("speedups", "optim.betas") or values[key] == value
        }
        lost = next((self._dropped[key] for key in entry.wrote if key in self._dropped), "")
        follows = lost == FOLLOWS
        outcome: Outcome
        if word is None:
            outcome, why = "unknown", "flatout does not know it."
        elif entry.value is None:
            outcome, why = "unnecessary", "It is not set."
        elif word.group == "missing":
            off = is_off(entry.value) or (entry.value == 1 and entry.value is not True)
            outcome = "unnecessary" if off else "missing"
            why = "It is off." if off else word.note
        elif not word.key:
            outcome, why = "unnecessary", word.note if word.group == "left_out" else word.advice
        elif becomes or follows:
            outcome, why = "mapped", lost
        elif entry.why or lost:
            outcome, why = "missing", entry.why or lost
        else:
            off = is_off(entry.value) or entry.value == -1
            outcome = "unnecessary"
            why = "It is off." if off else word.note or "flatout does this by default."
        value = HIDDEN if entry.key.endswith(SECRETS) else entry.value
        return Item(key=entry.key, value=value, outcome=outcome, becomes=becomes, why=why)
