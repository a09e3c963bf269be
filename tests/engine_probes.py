"""Strings that reveal differences between engines, some from the vocabulary itself."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from flatout.data.tokenizers.base import Tokenizer
from flatout.data.tokenizers.check import CORNERS
from flatout.data.tokenizers.engine_choice import _vocabulary

_SAMPLED_FROM = 0x20000
"""Beyond this code point Unicode is mostly ideographs, of which a sample is enough."""
_LONG = ("a", "ab", " ", "\n", " \n", "é", "1", ".", "🙂", "\u0301", "aB", "日")
_LONG_CHARACTERS = 20_000
_VERY_LONG_CHARACTERS = 100_000


def probes(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield strings that reveal differences between engines, some from the vocabulary itself."""
    yield from CORNERS
    yield "".join(CORNERS)
    yield from _literals(tokenizer)
    yield from _every_character()
    yield from _vocabulary(tokenizer)
    yield from (piece * (_LONG_CHARACTERS // len(piece)) + "x" for piece in _LONG)
    yield "ab" * (_VERY_LONG_CHARACTERS // 2)
    yield from _random(tokenizer)


def _literals(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield special and added tokens as text: whole, truncated and overlapping."""
    for name in _literal_tokens(tokenizer):
        yield (
            f"{name} a{name}b {name}{name}\n{name[:-1]} {name[1:]}{name[:1]}{name} "
            f"\u0338{name}\u0338 {name.upper()}"
        )


def _literal_tokens(tokenizer: Tokenizer) -> Iterable[str]:
    """Return end-of-text and at most 64 tokens that the file adds to its vocabulary."""
    document = tokenizer.document().get("tokenizer", {})
    added = [str(entry["content"]) for entry in document.get("added_tokens") or []]
    end = tokenizer.decode([tokenizer.eot_id])
    return dict.fromkeys([end, "<|endoftext|>", *added[:32], *added[-32:]])


def _every_character() -> Iterator[str]:
    """Yield every assigned character in words, in numbers and at line ends.

    Large uniform blocks contribute one character in sixteen.
    """
    waiting: list[str] = []
    for code in chain(range(_SAMPLED_FROM), range(_SAMPLED_FROM, 0x110000, 251)):
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cs", "Cn", "Co") or (category == "Lo" and code % 16 and code > 0x3400):
            continue
        waiting.append(f"a{character} {character}1{character}\n")
        if len(waiting) == 2000:
            yield "".join(waiting)
            waiting.clear()
    yield "".join(waiting)


def _random(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield random mixtures, the same on every run."""
    stream = random.Random(0)
    alphabets: list[Callable[[], str]] = [
        lambda: chr(stream.randrange(0x20, 0x7F)),
        lambda: chr(stream.randrange(0xD800)),
        lambda: chr(stream.randrange(0x300)),
        lambda: stream.choice(" \t\n\r\x0b\x85\xa0\u2028'sdmtre1a.A/\u0301"),
        lambda: stream.choice("abcdefghijklmnopqrstuvwxyz"),
        lambda: tokenizer.decode([stream.randrange(tokenizer.vocab_size)]),
    ]
    for number in range(600):
        draw = alphabets[number % len(alphabets)]
        yield "".join(draw() for _ in range(stream.randrange(1, 80)))
    yield "".join(alphabets[4]() for _ in range(20_000))
