"""Reads and writes YAML: numbers are decimal (`3e-4`, `010`) or hexadecimal, only true and false
are booleans, and repeated keys are errors.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flatout.errors import ConfigError
from flatout.storage.recognised import read_regular, recognise

if TYPE_CHECKING:
    from flatout.storage.json_io import (
        JsonObject,  # imports numpy, which would slow down `flatout --help`
    )


MOST_BYTES = 1 << 20
"""Size of the largest configuration that is read."""
MOST_VALUES = 50_000
"""Keys and values of a document, counting what its aliases repeat: nine levels of nine aliases,
a few hundred bytes, are 400 million."""
CHARS_PER_VALUE = 200
"""A text counts once more for each of these, so the limit is also 10 million characters."""
UNUSUAL = re.compile(r"[^\n -~]|[?!]|[|>]\S*#")
"""What libyaml and PyYAML read differently in some places."""
NESTED, MOST_NESTED = re.compile(r"[\[{]|- "), 5000
"""What may begin one more level on the same line. libyaml's binding crashes from 12,000 levels."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without the traps of YAML 1.1.

    YAML 1.1 reads 3e-4 as text, on and no as booleans, 010 as 8, 1:30 as 90 and 2026-01-02 as a
    date, and silently keeps the last of two equal keys. PyYAML also rejects tabs between words and
    at the end of a line.
    """

    def scan_to_next_token(self) -> None:
        """Skip blanks and comments, and tabs that do not indent."""
        super().scan_to_next_token()
        while self.peek() == "\t":
            blanks = 1
            while self.peek(blanks) in " \t":
                blanks += 1
            first = not self.buffer[self.pointer - self.column : self.pointer].strip()
            if first and not self.flow_level and self.peek(blanks) not in "\0\r\n#":
                raise yaml.scanner.ScannerError(
                    problem="the line is indented with a tab, not with spaces",
                    problem_mark=self.get_mark(),
                )
            self.forward(blanks)
            super().scan_to_next_token()


def _unique_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> JsonObject:
    seen: JsonObject = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key == "<<" and not key_node.style:
            raise ConfigError(
                f"{node.start_mark.name}, line {key_node.start_mark.line + 1}: << merges another "
                "mapping, which YAML 1.2 no longer has.",
                fix="Write the keys of that mapping here.",
            )
        is_text = isinstance(key, str)
        if not is_text or key in seen:
            raise ConfigError(
                f"{node.start_mark.name}, line {key_node.start_mark.line + 1}: the key {key!r} is "
                f"{'given twice' if is_text else 'not text'}.",
                fix="Delete one of them." if is_text else "Put it in quotes, or name it.",
            )
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


def _whole_number(_loader: _Loader, node: yaml.ScalarNode) -> int:
    """Return a decimal or hexadecimal number. ValueError if Python cannot print it."""
    digits = node.value.replace("_", "")
    return int(str(int(digits, 16 if "x" in digits else 10)))


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper. It quotes texts that YAML 1.1 or `_Loader` would read as values."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Return a text as YAML: in double quotes, which keep its line breaks, if it has any."""
    style = '"' if text.splitlines() not in ([], [text]) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0x[0-9a-fA-F_]+|[0-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|"
        r"(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
        r"|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Dumper.add_representer(str, _represent_text)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


class _FastLoader(yaml.CSafeLoader if yaml.__with_libyaml__ else _Loader):  # type: ignore[misc]
    """libyaml's parser, ten times as fast, with the numbers, words and keys of `_Loader`."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
    yaml_constructors = _Loader.yaml_constructors


def _num_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return the keys and values of a node, counting what its aliases repeat."""
    if node not in known:
        known[node] = 0  # a node that contains itself is an error of the constructor
        if isinstance(node, yaml.ScalarNode):
            inner = len(node.value) // CHARS_PER_VALUE
        else:
            parts = node.value if isinstance(node, yaml.SequenceNode) else chain(*node.value)
            inner = sum(_num_values(part, known) for part in parts)
        known[node] = 1 + inner
    return known[node]


def _value(loader: _Loader | _FastLoader, name: str) -> Any:
    """Return the value of the one document that a loader reads.

    Raises: ConfigError when it has more than `MOST_VALUES`.
    """
    node = loader.get_single_node()
    if node is None:
        return None
    if _num_values(node, {}) > MOST_VALUES:
        raise ConfigError(
            f"{name} contains more than {MOST_VALUES:,} values.",
            fix=f"Shorten it. A text counts once more for every {CHARS_PER_VALUE} characters, "
            "and what an alias (*name) stands for counts each time.",
        )
    return loader.construct_document(node)


def dump_yaml(document: JsonObject) -> str:
    """Return a mapping as YAML, which `parse_yaml` and other readers of YAML read as equal."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parser_says(error: Exception) -> str:
    """Return the message of a YAML or JSON parser, reworded for numbers with too many digits."""
    too_long = "integer string conversion" in str(error)
    return (
        f"a number has more than {sys.get_int_max_str_digits():,} digits"
        if too_long
        else str(error)
    )


def parse_yaml(text: str, *, name: str) -> Any:
    """Return the value of a YAML text. Error messages call it `name`.

    Raises: ConfigError with the line that could not be read.
    """
    if not UNUSUAL.search(text) and len(NESTED.findall(text)) <= MOST_NESTED:
        with suppress(ConfigError, yaml.YAMLError, ValueError, OverflowError, RecursionError):
            return _value(_FastLoader(text), name)
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{name} contains the character #x{error.character:04x}, which YAML does not allow.",
            fix="Delete it.",
        ) from error
    loader.name = name
    try:
        return _value(loader, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}," if mark else ""
        raise ConfigError(
            f"{name}{position} is not valid YAML: {error.problem}.",
            fix="Correct it there, or just before.",
        ) from error
    except (
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # `!!int x`, or brackets nested a thousand deep
        raise ConfigError(
            f"{name} contains a value that cannot be read: {parser_says(error)}.",
            fix="Put it in quotes, or delete it.",
        ) from error
    finally:
        loader.dispose()


def read_text(path: Path, wanted: str = "a YAML file") -> str:
    """Return the text of a file. Errors call it `wanted`.

    Raises: ConfigError when the file does not exist, is too large, or is not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES and recognise(path) is None:
            raise ConfigError(
                f"{path} has {size:,} bytes, which is too many for {wanted} with settings.",
                fix="Name the file with the settings.",
            )
        return read_regular(path)
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror}.", fix="Check the path and its permissions."
        ) from error
    except UnicodeDecodeError as error:
        known = recognise(path)
        if known is not None:
            raise ConfigError(known.instead_of(wanted), fix=known.fix) from error
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {error.start} cannot be read.",
            fix="Save the file as UTF-8.",
        ) from error


def read_document(path: Path) -> JsonObject:
    """Return the mapping in a YAML file. An empty file is an empty mapping.

    Raises: ConfigError when the file does not exist, is not YAML, or is not a mapping.
    """
    document = parse_yaml(read_text(path), name=str(path))
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} is not a mapping of sections.",
            fix="Write sections such as `optim:` with their keys under them.",
        )
    return document
