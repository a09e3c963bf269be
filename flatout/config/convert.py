"""Converts another tool's config: every key is mapped, unnecessary, missing here, or unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from flatout.config.messages import field_at
from flatout.config.overrides import nested
from flatout.config.schema import ALTERNATIVES, MAPPINGS, RunConfig, validate
from flatout.config.units import EARLY, LATE, SOURCE, THEIRS, UNITS, Refused, Unneeded, is_off
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
FREE_OF_WEIGHTS = {"model.kind", "model.dropout", "model.z_loss", "model.chunk_size"}
"""Keys of the model that stay beside train.init_from; the weights have a shape of their own."""
OF_WEIGHTS = Unneeded("The shape is that of the weights which train.init_from names.")
CONSTANT = Unneeded("The rate is constant.")
FROM_WARMUP = Unneeded("The decay starts after the warm-up.")
ONLY_WSD = "Only schedule.kind=wsd keeps the rate before it falls."
ANOTHER, BY_DEFAULT = "Another key states it.", "flatout does this by default."
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


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
    options: JsonObject = field(default_factory=dict)
    """Options of `flatout prepare`, and SOURCE, its argument."""


def convert(document: JsonObject, computed: list[str]) -> Conversion:
    """Convert the values of a config; `computed` names keys whose values are unknown."""
    flat = dict(_flat(document))
    found = Conversion(_tool_of(set(flat)))
    renames = found.tool.renames if found.tool else {}
    entries = [_Entry(key, one, word_for(renames.get(key, key))) for key, one in flat.items()]
    entries += _defaults(found.tool, entries, computed)
    reading = _Reading(flat)
    for entry in sorted(entries, key=lambda one: (one.unit in LATE) - (one.unit in EARLY)):
        reading.read(entry)
    found.values, found.options = reading.finish(found.tool)
    items = [(entry, reading.item(entry)) for entry in entries]
    found.defaults = {
        entry.key: entry.value
        for entry, item in items
        if entry.is_default and item.outcome == "mapped"
    }
    found.items = [
        item for entry, item in items if not entry.is_default or item.outcome == "missing"
    ]
    found.items += [_computed(key) for key in computed]
    return found


def _defaults(tool: Tool | None, entries: list[_Entry], computed: list[str]) -> list[_Entry]:
    """Return the tool's defaults that no key states, with a value or computed."""
    used = {(one.key_of, one.unit) for one in entries if one.value is not None and one.value != -1}
    stated = {key for key, _ in used if key}
    sections = {one.key.rpartition(".")[0] for one in entries}
    if tool is None:
        return []
    on = {one.key for one in entries if not is_off(one.value)}
    has_adapters = not tool.adapters or tool.adapters in on
    found = []
    for key, value in tool.defaults.items():
        entry = _Entry(key, value, word_for(key), is_default=True)
        rivals = {other for group in ALTERNATIVES if entry.key_of in group for other in group}
        shared = {entry.key_of} - {"optim.betas"}  # half of it may be stated
        is_free = has_adapters or not entry.key_of.startswith("lora.")
        is_free &= (entry.key_of, entry.unit) not in used and not stated & (rivals | shared)
        section = key.rpartition(".")[0]
        if is_free and key not in computed and (section != tool.optional or section in sections):
            found.append(entry)
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
        if key == "datasets" and isinstance(value, list) and [*map(type, value)] == [dict]:
            as_one, value = False, value[0]  # Axolotl's list of one
        elif key == "datasets" and isinstance(value, list) and (form := _form_of(value)):
            yield f"{prefix}datasets.type", form
        if isinstance(value, dict) and value and not as_one:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _form_of(datasets: list[Any]) -> Any:
    """Return the form of the rows that all of Axolotl's datasets have, or None."""
    forms = [one.get("type") if isinstance(one, dict) else None for one in datasets]
    return forms[0] if forms and all(form == forms[0] for form in forms) else None


def _tool_of(keys: set[str]) -> Tool | None:
    """Return the tool that most keys belong to; one key alone says nothing.

    Of two with as many, the one that has a default for more of the keys: LoRA's, for example.
    """
    best = max(tools(), key=lambda tool: (len(tool.keys & keys), len(keys & tool.defaults.keys())))
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


def _number(value: Any, key: str) -> Any:
    """Return quoted numbers as numbers, unless the key of flatout is text."""
    field = field_at(RunConfig, key)
    is_text = field is not None and not re.search(r"\b(int|float)\b", str(field.annotation))
    if is_text or not isinstance(value, str) or not NUMBER.fullmatch(value):
        return value
    return float(value) if re.search(r"[.eE]", value) else int(value)


def _preference(key: str) -> int:
    return PREFERRED.index(key) if key in PREFERRED else len(PREFERRED)


def _as_it_is(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject:
    """Return the value unchanged: the key without a unit."""
    return {key: value}


class _Reading:
    """Collects values of flatout, each from the first key that states it."""

    def __init__(self, theirs: JsonObject) -> None:
        self._theirs = {f"{THEIRS}{key}": value for key, value in theirs.items()}
        self._values: JsonObject = {}
        self._implied: JsonObject = {}
        self._speedups: list[str] = []
        self._dropped: dict[str, str] = {}
        """Why a key of flatout was left out again."""

    def read(self, entry: _Entry) -> None:
        """Convert one entry, and keep what no earlier one has set."""
        word = entry.word
        if word is None or not (word.key or word.unit) or entry.value is None:
            return
        _, _, argument = word.unit.partition(" ")
        convert_value = UNITS.get(entry.unit, _as_it_is)
        known = self._theirs | self._implied | self._values
        try:
            value = _number(entry.value, word.key)
            result = convert_value(value, argument or word.key or word.option, known)
        except (TypeError, ValueError, ArithmeticError):
            result = f"The value {entry.value!r} cannot be converted."
        if isinstance(result, Refused):
            raise ConfigError(
                f"{entry.key}={entry.value!r} {result}.",
                fix="Convert the config of a training on text or conversations.",
            )
        if isinstance(result, str):
            entry.why = result
            return
        for key, value in result.items():
            if key == "speedups":
                self._speedups.append(value)
            elif not key:
                entry.why = value
                continue
            elif key.startswith("~"):
                self._implied.setdefault(key[1:], value)
            elif self._values.setdefault(key, value) != value and key != "optim.betas":
                entry.why = f"{key}={self._values[key]} is already set."
                continue
            else:
                self._values[key] = value
            entry.wrote[key.lstrip("~")] = value

    def finish(self, tool: Tool | None) -> tuple[JsonObject, JsonObject]:
        """Return all values, without contradictions, as `RunConfig` accepts them, and the options
        of `flatout prepare`.
        """
        values = self._values
        for key, value in {**(tool.implies if tool else {}), **self._implied}.items():
            group = next((group for group in ALTERNATIVES if key in group), {key})
            if not group & values.keys():
                values[key] = value
        self._without_effect(tool)
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
        options = {key: value for key, value in values.items() if key.startswith(("--", SOURCE))}
        return self._valid({key: values[key] for key in values if key not in options}), options

    def _without_effect(self, tool: Tool | None) -> None:
        """Drop keys that another key makes irrelevant."""
        values = self._values
        if tool and tool.adapters and is_off(self._theirs.get(f"{THEIRS}{tool.adapters}")):
            for key in [key for key in values if key.startswith("lora.")]:
                self._drop(key, Unneeded(f"Without {tool.adapters}, there are no adapters."))
        if "train.init_from" in values:
            shape = {key for key in values if key.startswith("model.")} - FREE_OF_WEIGHTS
            for key in shape:
                self._drop(key, OF_WEIGHTS)
        if values.get("schedule.kind") == "constant":
            self._drop("schedule.min_lr", CONSTANT)
        if values.get("schedule.kind", "wsd") != "wsd":
            whole = values.get("schedule.decay") == 1
            self._drop("schedule.decay", FROM_WARMUP if whole else ONLY_WSD)

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
        reason = entry.why or lost
        outcome: Outcome
        if entry.value is None:
            outcome, why = "unnecessary", "It is not set."
        elif word is None:
            outcome, why = "unknown", "flatout does not know it."
        elif becomes or lost == FOLLOWS:
            outcome, why = "mapped", reason
        elif reason:
            outcome, why = ("unnecessary" if isinstance(reason, Unneeded) else "missing"), reason
        elif word.group == "missing":
            off = is_off(entry.value) or (entry.value == 1 and entry.value is not True)
            outcome = "unnecessary" if off else "missing"
            why = "It is off." if off else word.note
        elif word.group == "left_out":
            outcome, why = "unnecessary", word.note
        elif is_off(entry.value) or entry.value == -1:
            outcome, why = "unnecessary", "It is off."
        elif word.group == "prepare":
            outcome, why = ("missing" if word.option else "unnecessary"), word.advice
        else:
            outcome = "unnecessary"
            why = ANOTHER if entry.wrote else BY_DEFAULT
        if entry.is_default:
            why += " It is the tool's default."
        value = HIDDEN if entry.key.endswith(SECRETS) else entry.value
        return Item(key=entry.key, value=value, outcome=outcome, becomes=becomes, why=why)
