"""Strings that reveal differences between engines, some from the vocabulary itself."""

import json
import random
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from flatout.data.tokenizers import Tokenizer
from flatout.data.tokenizers.engine_choice import vocabulary_texts

CORNERS = (
    "",
    " ",
    "  a  b\t\tc \n d\n\n e\r\n\r\nf \r g\n \n",
    "don't DON'T we'll WE'LL it\u2019s 'S 'ſ I've'd re're \u017f's",
    "1 12 123 1234 12345 1a2b ²³½ ١٢٣ Ⅷ ①",
    "e\u0301 E\u0308\u0301 a\u0323\u0307 \u0301x \u1100\u1161\u11a8 \u212b "
    "\u0344 q\u0307\u0323 \u0915\u093c",
    "\u200b\u200c\u200d\u2060\ufeff a\u200bb \u200d\u200d \u00ad",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000 x\x1cy",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 1️⃣",
    "日本語のテキスト。中文，测试！한국어 ไทย العربية עברית हिन्दी",
    "\ufffe\uffff\ue000\U000f0000\U0010ffff\ufdd0\ufffd",
    "camelCaseHTTPServer snake_case __init__ x+=1; // a/b/c\n/d ...\n\n!!!\r\n==>\n",
    "Ǆ ǅ ǆ ß ẞ İ ı ﬁ ﬀ Σσς",
)
"""Strings of unusual characters, spaces, line ends and combinations."""
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
    yield from vocabulary_texts(tokenizer)
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
    added = [entry["content"] for entry in json.loads(tokenizer.content)["added_tokens"]]
    return dict.fromkeys(["<|endoftext|>", *added[:32], *added[-32:]])


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
