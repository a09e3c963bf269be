"""The words of other tools, from words.yaml: what their keys, options and names are called here.

The file is read at the first question, which is usually a mistake that is about to be reported.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".yaml")
OFF = {"none", "no", "off", "false", "disabled", "eager", "for-loop", "foreach", "0", "-1"}
"""Values, as text, that turn a feature off."""


@dataclass(frozen=True)
class Word:
    """What some names of other tools mean in flatout."""

    names: tuple[str, ...]
    group: str
    """keys, prepare, left_out or missing: the section of words.yaml."""
    key: str = ""
    """The key of flatout, for the group `keys`."""
    option: str = ""
    """The option of `flatout prepare`, for the group `prepare`."""
    differs: bool = False
    """Whether its values have another unit or meaning than flatout's."""
    if_true: str | None = None
    """The overrides that say what `true` says there. Empty if there is nothing to write."""
    if_false: str | None = None
    """The same for `false`."""
    note: str = ""
    """A sentence, after a colon for the groups `left_out` and `missing`."""

    @property
    def advice(self) -> str:
        """What to do about one of the names, as the fix of an error."""
        if self.group == "keys":
            return f"Did you mean {self.key!r}? {self.note}".rstrip()
        if self.group == "left_out":
            return f"Leave it out: {self.note}"
        if self.group == "missing":
            return f"Leave it out. flatout has no counterpart: {self.note}"
        if not self.option:
            return f"Leave it out. {self.note}"
        return f"`flatout prepare` has it: {self.option}. {self.note}".rstrip()


@cache
def _document() -> dict[str, Any]:
    from flatout.config.documents import read_document  # imports yaml

    return read_document(TABLE)


@cache
def words(group: str) -> tuple[Word, ...]:
    """Return the entries of a section of words.yaml, in their order."""
    return tuple(
        Word(group=group, **{**entry, "names": tuple(entry["names"].split())})
        for entry in _document()[group]
    )


def listings() -> dict[str, list[str]]:
    """Return the keys of each tool's configs, by the name of the tool."""
    return {tool: keys.split() for tool, keys in _document()["listings"].items()}


def metadata_rows() -> Any:
    """Return what a metadata.json may state: rows of words.yaml with their keys."""
    return _document()["metadata"]


@cache
def _by_name(*groups: str) -> dict[str, Word]:
    """Return the words of some groups by name, of all by default. An earlier group wins."""
    groups = groups or ("keys", "left_out", "missing", "prepare")
    return {
        name: word for group in reversed(groups) for word in words(group) for name in word.names
    }


def word_for(key: str) -> Word | None:
    """Return what a key of another tool's config means, or None.

    The key may be dotted. The whole of it is looked up first, then its last parts, and finally its
    first parts, since a section without a counterpart has no keys with one.
    """
    table = _by_name()
    parts = _plain(key).split(".")
    for start in range(len(parts)):
        if found := table.get(".".join(parts[start:])):
            return found
    sections = (table.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    return next((found for found in sections if found and not found.key), None)


def known_words() -> dict[str, Word]:
    """Return every word by each of its names, without those of a section."""
    table = _by_name()
    return {name: word for name, word in table.items() if "." not in name}


def prepare_word_for(option: str) -> Word | None:
    """Return what an option of another tool's preparation means, or None."""
    return _by_name("prepare").get(_plain(option))


def name_for(noun: str, name: str, known: Collection[str]) -> str | None:
    """Return what another tool's name of a recipe, a dataset, ... is called here, if it is known.

    The name may have the other tool's prefixes and capitals.
    """
    names = _document()["names"].get(noun.partition(" or ")[0], {})
    spellings = (name.lower(), _plain(name), _plain(name).replace("_", "-"))
    found = next((names[one] for one in spellings if one in names), None)
    return found if found in known else None


def removed(what: str) -> str | None:
    """Return what replaces a removed command (`launch`), option (`diagnose --fix`), value (`export
    --to gguf`), config key or entry of a list (`source capitals`), or None.
    """
    found: str | None = _document()["removed"].get(what)
    return found


def value_for(key: str, value: object) -> Any:
    """Return what another tool's value of flatout's `key` is here, or None."""
    return _document()["values"].get(key, {}).get(str(value).lower())


def values_of(key: str) -> set[Any]:
    """Return the values of flatout's `key` that other tools have names for."""
    return set(_document()["values"].get(key, {}).values())


def is_off(value: object) -> bool:
    """Return whether a value of another tool turns its feature off, `enabled` of a section too."""
    stated = value.get("enabled", value) if isinstance(value, dict) else value
    return not stated or str(stated).lower() in OFF


def _plain(name: str) -> str:
    return name.lower().lstrip("-").partition("=")[0].replace("-", "_")
