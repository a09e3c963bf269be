"""Translate another tool's config into a recipe, by a table of names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

from flatout.assembly.preflight import check_names
from flatout.cli.commands import Command
from flatout.config.documents import dump_yaml, read_document
from flatout.config.registry import SUFFIXES, unknown_name
from flatout.config.schema import (
    MAPPINGS,
    RunConfig,
    nested,
    override,
    parse_overrides,
    validate,
)
from flatout.config.signature import Argument, Option, checked, one_of
from flatout.config.words import is_off, listings, value_for, values_of, word_for
from flatout.data.token_files import find_tokens
from flatout.display import Display, Show, table_of
from flatout.errors import ConfigError, DataError, OutputInUse, UsageError, in_shell
from flatout.storage.files import Stored, expanded, write_text, writing
from flatout.storage.json_io import JsonObject, Result
from flatout.storage.recognised import import_it, recognise, require_recipe_path

SECRET = re.compile(
    r"(?i)(hub|hf|api|auth|access)[_-]?token|api[_-]?key|password|secret|authorization|cookie"
    r"|bearer |://[^/\s]*:[^/\s]*@|(^|[.{' ])token'?[=:]"
)
"""In a key or its value, which may be a section: the value is not repeated."""
Outcome = Literal["mapped", "by_hand", "missing", "unknown", "unnecessary"]
HEADINGS: dict[Outcome, str] = {
    "mapped": "Mapped",
    "by_hand": "To convert by hand",
    "missing": "Not in flatout",
    "unknown": "Unknown",
    "unnecessary": "Nothing to set",
}
"""The outcomes in the order of the summary."""


class Item(Stored):
    """What a key of another tool is in flatout."""

    key: Annotated[str, Show(record=lambda item: item.shown())]
    """The other tool's key, dotted if it is in a section."""
    value: Any = None
    """Its value."""
    outcome: Outcome
    """mapped (the recipe has it), by_hand (its value has another unit or meaning), missing (no
    counterpart), unknown, or unnecessary (nothing to set)."""
    counterpart: Annotated[str, Show()] = ""
    """The overrides of a mapped key, or else the key of flatout or the option of `flatout
    prepare`."""
    note: Annotated[str, Show()] = ""
    """What to know about it, or why there is no counterpart."""

    def shown(self) -> str:
        """Return the key, and the start of its value."""
        return self.key if self.value is None else f"{self.key}={shorten(str(self.value), 40)}"

    def comment(self) -> str:
        """Return a sentence about a key that the recipe lacks."""
        instead = f"see {self.counterpart}. " if self.counterpart not in self.note else ""
        return f"# {self.shown()} was not converted: {instead}{self.note}"


class ConvertResult(Result):
    """The recipe, and what became of each key. With `--keys`, the counterparts alone."""

    path: str | None = None
    """The recipe that was written."""
    items: list[Item]
    """Every key."""

    def display(self) -> Display:
        """Return a table of keys for each outcome, and the next step."""
        tables = [
            table_of(found, f"{heading}: {len(found)}")
            for outcome, heading in HEADINGS.items()
            if (found := [item for item in self.items if item.outcome == outcome])
        ]
        if self.path is None:
            return Display(tables=tables)
        next_step = f"Next: flatout plan {in_shell(self.path)}"
        return Display(f"{self.path}  written", (), tables, [next_step])


@checked
def convert_config(
    config: Annotated[Path | str | None, Argument("A config of YAML or JSON.")] = None,
    out: Annotated[Path | str | None, Option("The recipe to write, a YAML file.")] = None,
    keys: Annotated[
        str | None,
        Option(
            "Show the counterparts of a tool's keys instead: axolotl, deepspeed, eigenstate, "
            "litgpt, nanogpt, neox, torchtitan or trainer (Hugging Face)."
        ),
    ] = None,
) -> ConvertResult:
    """Translate the keys of another tool's config into a recipe, and list those that it leaves out.

    Keys that mean the same in flatout are renamed. Of the others, each is listed with what to write
    instead, or why there is nothing to write. `--keys TOOL` lists all keys of a tool.

    Raises: ConfigError when no key has a counterpart, or when there is no such tool; OutputInUse
            when `out` exists.
    """
    one_of({"--keys": keys, "a config": config or out})
    if keys is not None:
        known = listings()
        if keys.lower() not in known:
            raise unknown_name("tool", keys.lower(), known)
        return ConvertResult(items=[_described(key) for key in known[keys.lower()]])
    if config is None or out is None:
        raise UsageError(
            "`flatout convert` needs a config and --out.", fix=f"For example `{COMMAND.example}`."
        )
    require_recipe_path(out, "--out ")
    source, target = expanded(config), expanded(out)
    if source.suffix.lower() not in {*SUFFIXES, ".json"}:
        raise ConfigError(
            f"{source} is neither YAML nor JSON.",
            fix="Write its values into a YAML file, `key: value` on each line. "
            "docs/coming-from.md has a recipe for each tool.",
        )
    if target.exists():
        raise OutputInUse(f"{target} exists.", fix="Choose a different file with --out FILE.")
    values, items = translate(read_document(source), source.parent)
    if not values:
        raise ConfigError(
            f"{source} has no key with a counterpart in flatout.",
            fix="Name the config of a training tool. `--keys nanogpt` shows nanoGPT's keys.",
        )
    left = [item for item in items if item.outcome not in ("mapped", "unnecessary")]
    lines = [f"# Converted by `flatout convert` from {source.name}", *map(Item.comment, left)]
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, "\n".join([*lines, dump_yaml(nested(values))]))
    return ConvertResult(path=str(target), items=items)


def _data_note(path: Path) -> str | None:
    """Return what to do with data that is here, if it is known."""
    with suppress(DataError):
        find_tokens(path)
        return import_it(path)
    return known.fix if (known := recognise(path)) else None


def translate(document: JsonObject, folder: Path) -> tuple[JsonObject, list[Item]]:
    """Return the values of flatout by dotted key, and what became of each key of a config.

    Paths of data may be relative to `folder`. A value that is off gives way to another key, epochs
    to steps, as in other tools. A key that needs another one is tried again.
    """
    values: JsonObject = {}
    items: dict[str, Item] = {}
    leaves = dict(_leaves(document))
    order = sorted(
        leaves, key=lambda key: (is_off(leaves[key]), _described(key).counterpart != "train.steps")
    )
    for key in [*order, *order]:
        if key not in items or items[key].outcome == "by_hand":
            items[key] = _translated(key, leaves[key], values, folder)
    return values, [items[key] for key in leaves]


def _leaves(document: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values. A section without a counterpart is one key."""
    for key, value in document.items():
        dotted = f"{prefix}{key}"
        word = word_for(dotted)
        if isinstance(value, dict) and value and (word is None or word.key not in ("", *MAPPINGS)):
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def _described(key: str, value: Any = None) -> Item:
    """Return what a key is in flatout, whatever its value is."""
    word = word_for(key)
    shown = "(hidden)" if value and SECRET.search(f"{key}={value}") else value
    if word is None:
        return Item(key=key, value=shown, outcome="unknown", note="flatout does not know it.")
    counterpart = word.key or (f"prepare {word.option}" if word.option else "")
    outcome = "mapped" if word.key and not word.differs else "by_hand" if counterpart else None
    return Item(
        key=key,
        value=shown,
        outcome=outcome or ("missing" if word.group == "missing" else "unnecessary"),
        counterpart=counterpart,
        note=word.note,
    )


def _translated(key: str, value: Any, values: JsonObject, folder: Path) -> Item:
    """Return what became of a key, and add to `values` what it states in flatout."""
    word, item = word_for(key), _described(key, value)

    def but(outcome: Outcome, note: str) -> Item:
        return item.model_copy(update={"outcome": outcome, "note": note})

    if word is None or item.outcome == "unnecessary":
        return item
    written = word.if_true if value is True else word.if_false if is_off(value) else None
    if value == "auto" and word.key not in ("batch.rows_per_device", "train.precision"):
        return but("unnecessary", "What starts the training decides it.")
    if value is None or written == "" or (is_off(value) and not word.key):
        default = "flatout does this by default."
        return but("unnecessary", default if value is True else "It is off.")
    if not word.key:
        return item
    roots = (Path(), folder, Path("data"), folder / "data", folder / "../data")  # nanoGPT's
    here = next(filter(os.path.exists, (root / str(value) for root in roots)), None)
    if word.key == "data.path" and here and (note := _data_note(here)):
        return but("by_hand", note)
    if written:
        stated = parse_overrides(written.split(), RunConfig)
    else:
        stated = {} if word.differs else {word.key: _value_here(word.key, value)}
    if not stated or None in stated.values():
        return item.model_copy(update={"outcome": "by_hand"})
    if taken := sorted(stated.keys() & values.keys() - {"speedups"}):
        set_already = f"{override(taken[0], values[taken[0]])} is set."
        return but("unnecessary" if is_off(value) else "by_hand", set_already)
    if "speedups" in stated and "speedups" in values:
        stated["speedups"] = values["speedups"] + stated["speedups"].removeprefix("auto")
    try:
        check_names(validate(nested(values | stated)))
    except ConfigError as error:
        return but("by_hand", error.what)
    values |= stated
    shown = " ".join(override(*one) for one in stated.items())
    return item.model_copy(update={"outcome": "mapped", "counterpart": shown})


def _value_here(key: str, value: Any) -> Any:
    """Return flatout's value of a key. None for a name that the table of words does not have."""
    names = values_of(key)
    if isinstance(value, list) and names:
        found = [_value_here(key, one) for one in value]
        return None if None in found else ", ".join(found)
    if not isinstance(value, str) or not names:
        return value
    return value_for(key, value) or (value.lower() if value.lower() in names else None)


COMMAND = Command(
    convert_config,
    example="flatout convert old-config.yaml --out my.yaml",
    writes_files=True,
)
