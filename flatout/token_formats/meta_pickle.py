"""Reads the characters in nanoGPT's meta.pkl from its opcodes, without unpickling it.

The file is a dict of strings and numbers. Nothing else is accepted, and nothing is called.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

META = "meta.pkl"
MAX_BYTES = 16 << 20
"""Larger than the dict of every character there is."""


def characters_in(path: Path) -> str | None:
    """Return the characters of a character vocabulary, in the order of their ids.

    None when the file is absent, or contains anything else.
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        found = _plain_value(path.read_bytes())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    of_id = found.get("itos") if isinstance(found, dict) else None
    if not isinstance(of_id, dict) or not of_id:
        return None
    characters = [of_id.get(number) for number in range(len(of_id))]
    if all(isinstance(one, str) and len(one) == 1 for one in characters):
        joined = "".join(map(str, characters))
        return joined if len(set(joined)) == len(joined) else None
    return None


class _Stack:
    """What the opcodes of a pickle of dicts, strings and integers build."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.values.append(value)

    def mark(self, _: object) -> None:
        self.marks.append(len(self.values))

    def empty_dict(self, _: object) -> None:
        self.values.append({})

    def memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self.values[-1]

    def put(self, index: Any) -> None:
        self.memo[int(index)] = self.values[-1]

    def get(self, index: Any) -> None:
        self.values.append(self.memo[int(index)])

    def set_items(self, _: object) -> None:
        start = self.marks.pop()
        items = self.values[start:]
        del self.values[start:]
        self.values[-1].update(zip(items[::2], items[1::2], strict=True))

    def set_item(self, _: object) -> None:
        key, value = self.values[-2:]
        del self.values[-2:]
        self.values[-1][key] = value

    def nothing(self, _: object) -> None:
        pass


_OPCODES: dict[str, Callable[[_Stack, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Stack.nothing),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1"),
            *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
        ),
        _Stack.push,
    ),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Stack.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Stack.get),
    "MARK": _Stack.mark,
    "EMPTY_DICT": _Stack.empty_dict,
    "MEMOIZE": _Stack.memoize,
    "SETITEMS": _Stack.set_items,
    "SETITEM": _Stack.set_item,
}


def _plain_value(data: bytes) -> Any:
    """Return the value in a pickle of dicts, strings and integers.

    Raises: KeyError for any other opcode; ValueError or IndexError for a damaged pickle.
    """
    stack = _Stack()
    for opcode, argument, _ in pickletools.genops(data):
        _OPCODES[opcode.name](stack, argument)
    return stack.values.pop()
