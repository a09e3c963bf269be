"""Which engine encodes: the fastest whose ids are those of the slowest, on strings made to tell
them apart and on text of the very corpus.

The strings are tried once for a tokenizer and an engine of these versions, and the verdict is kept;
the corpus is tried every time. An engine that is absent, fails or differs is passed over aloud, and
is never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from flatout.data.tokenizers.base import Ids, StoredTokenizer
from flatout.data.tokenizers.engines import described
from flatout.errors import DataError, FlatoutError
from flatout.progress import Progress

WORTHWHILE_CHARACTERS = 4_000_000
"""Less text is encoded in the time that finding a faster engine takes."""
CHECKED_CHARACTERS = 256_000
"""About how much text of the corpus engines are compared on, spread evenly over what is sampled."""
CHUNK_CHARACTERS = 4096
PROBES_VERSION = 1
"""Counts up with every change of `probes`, so that no kept verdict is of other strings."""
SHOWN_CHARACTERS = 20

_SAMPLED_FROM = 0x20000
"""From here on Unicode is ideographs and the like, of which some stand for all."""
CORNERS = (
    "",
    " ",
    "  a  b\t\tc \n d\n\n e\r\n\r\nf \r g\n \n",
    "don't DON'T we'll WE'LL it\u2019s 'S 'ſ I've'd re're \u017f's",
    "1 12 123 1234 12345 1a2b ²³½ ١٢٣ Ⅷ ①",
    "e\u0301 E\u0308\u0301 a\u0323\u0307 \u0301x \u1100\u1161\u11a8 \u212b \u0344 q\u0307\u0323 \u0915\u093c",
    "\u200b\u200c\u200d\u2060\ufeff a\u200bb \u200d\u200d \u00ad",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000 x\x1cy",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 1️⃣",
    "日本語のテキスト。中文，测试！한국어 ไทย العربية עברית हिन्दी",
    "\ufffe\uffff\ue000\U000f0000\U0010ffff\ufdd0\ufffd",
    "camelCaseHTTPServer snake_case __init__ x+=1; // a/b/c\n/d ...\n\n!!!\r\n==>\n",
    "Ǆ ǅ ǆ ß ẞ İ ı ﬁ ﬀ Σσς",
)
_LONG = ("a", "ab", " ", "\n", " \n", "é", "1", ".", "🙂", "\u0301", "aB", "日")
_LONG_CHARACTERS = 20_000
_VERY_LONG_CHARACTERS = 100_000


def choose_engine(
    tokenizer: StoredTokenizer, sample: Iterable[str], *, cache: Path | None, progress: Progress
) -> StoredTokenizer:
    """Return the tokenizer with the fastest engine that gives its ids, and say in one line which
    and why.

    `sample` gives text of the corpus, more than `WORTHWHILE_CHARACTERS` where there is so much;
    below, the tokenizer stays as it is. `cache` is where verdicts are kept, None keeps none.
    """
    texts = _thinned(sample) if tokenizer.engines else []
    if not texts:
        return tokenizer
    *faster, slowest = tokenizer.engines
    reference = tokenizer.with_engine(slowest)
    passed_over: list[str] = []
    for engine in faster:
        candidate = reference.with_engine(engine)
        try:
            name = described(engine)
            candidate.encode_piece("", 0)
            verdict = _kept(candidate, reference, cache) or difference(candidate, reference, texts)
        except FlatoutError as error:
            verdict = error.what.rstrip(".")
        if not verdict:
            size = sum(len(text.encode()) for text in texts) / 1e6
            progress.say(
                _sentence(
                    passed_over,
                    f"encodes with {name} (same ids as {slowest} on {size:.1f} MB of this text).",
                )
            )
            return candidate
        passed_over.append(verdict)
    progress.say(_sentence(passed_over, f"encodes with {slowest}."))
    return reference


def _sentence(passed_over: list[str], verdict: str) -> str:
    return (
        "; ".join(passed_over) + f": {verdict}" if passed_over else verdict[0].upper() + verdict[1:]
    )


def _thinned(sample: Iterable[str]) -> list[str]:
    """Return evenly spread chunks of the sample; none when it is too little. What is no text is
    left to packing, which says so.
    """
    chunks: list[str] = []
    size = 0
    for text in sample:
        size += len(text)
        chunks += (
            text[start : start + CHUNK_CHARACTERS]
            for start in range(0, len(text), CHUNK_CHARACTERS)
        )
    if size < WORTHWHILE_CHARACTERS:
        return []
    return [
        chunk.encode(errors="ignore").decode()
        for chunk in chunks[:: max(size // CHECKED_CHARACTERS, 1)]
    ]


def difference(candidate: StoredTokenizer, reference: StoredTokenizer, texts: Iterable[str]) -> str:
    """Return how the ids of two engines differ on some texts, in words; nothing when they do not."""
    for text in texts:
        wanted = _ids_or_error(reference, text)
        given = _ids_or_error(candidate, text)
        if isinstance(wanted, str) or isinstance(given, str):
            if type(wanted) is not type(given):
                refused = (
                    given
                    if isinstance(given, str)
                    else f"not refused, as by {reference.engine}: {wanted}"
                )
                return f"{candidate.engine} differs from {reference.engine} at {text[:SHOWN_CHARACTERS]!a} ({refused})"
        elif not np.array_equal(wanted, given):
            size = min(len(wanted), len(given))
            same = int(np.argmin(np.append(wanted[:size] == given[:size], False)))
            near = len(reference.decode(wanted[:same].tolist()))
            shown = text[max(near - SHOWN_CHARACTERS // 2, 0) : near + SHOWN_CHARACTERS // 2]
            return f"{candidate.engine} differs from {reference.engine} at {shown!a}"
    return ""


def _ids_or_error(tokenizer: StoredTokenizer, text: str) -> Ids | str:
    """Return the ids, or why there are none. A panic in Rust is no Exception, and must not end what
    a slower engine can do.
    """
    try:
        return tokenizer.encode_piece(text, 0)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except DataError as error:
        return error.what.rstrip(".")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _kept(candidate: StoredTokenizer, reference: StoredTokenizer, cache: Path | None) -> str:
    """Return `difference` on the probes, from the last time when that is known."""
    versions = [
        described(candidate.engine),
        described(reference.engine),
        unicodedata.unidata_version,
        str(PROBES_VERSION),
    ]
    key = hashlib.sha256("\n".join([reference.digest(), *versions]).encode()).hexdigest()
    place = cache.expanduser() / "engines" / f"{key[:32]}.json" if cache is not None else None
    try:
        held = json.loads(place.read_text(encoding="utf-8")) if place is not None else {}
    except (OSError, ValueError):
        held = {}
    if isinstance(held, dict) and isinstance(held.get("difference"), str):
        return str(held["difference"])
    verdict = difference(candidate, reference, probes(reference))
    if place is not None:
        keep(place, {"engines": versions, "difference": verdict})
    return verdict


def keep(place: Path, verdict: dict[str, object]) -> None:
    """Write a verdict; where that is not possible it is found again the next time."""
    half = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(json.dumps(verdict) + "\n", encoding="utf-8")
        half.replace(place)
    except OSError:
        with suppress(OSError):
            half.unlink()


def probes(tokenizer: StoredTokenizer) -> Iterator[str]:
    """Yield strings on which engines part ways if they ever do, some of them from the tokenizer's
    own vocabulary.
    """
    yield from CORNERS
    yield "".join(CORNERS)
    yield from _literals(tokenizer)
    yield from _every_character()
    yield from _vocabulary(tokenizer)
    yield from (piece * (_LONG_CHARACTERS // len(piece)) + "x" for piece in _LONG)
    yield "ab" * (_VERY_LONG_CHARACTERS // 2)
    yield from _random(tokenizer)


def _literals(tokenizer: StoredTokenizer) -> Iterator[str]:
    """Special and added tokens written out in text, whole, cut off and overlapping."""
    for name in literal_tokens(tokenizer):
        yield f"{name} a{name}b {name}{name}\n{name[:-1]} {name[1:]}{name[:1]}{name} \u0338{name}\u0338 {name.upper()}"


def literal_tokens(tokenizer: StoredTokenizer) -> list[str]:
    """Return end-of-text and the tokens that the tokenizer's file adds to its vocabulary, at most
    64 of them.
    """
    document = tokenizer.document().get("tokenizer", {})
    added = [str(entry["content"]) for entry in document.get("added_tokens") or []]
    return list(
        dict.fromkeys(
            [tokenizer.decode([tokenizer.eot_id]), "<|endoftext|>", *added[:32], *added[-32:]]
        )
    )


def _every_character() -> Iterator[str]:
    """Every assigned character in words, in numbers and at line ends; of large uniform blocks, one
    in sixteen.
    """
    held: list[str] = []
    for code in chain(range(_SAMPLED_FROM), range(_SAMPLED_FROM, 0x110000, 251)):
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cs", "Cn", "Co") or (category == "Lo" and code % 16 and code > 0x3400):
            continue
        held.append(f"a{character} {character}1{character}\n")
        if len(held) == 2000:
            yield "".join(held)
            held.clear()
    yield "".join(held)


def _vocabulary(tokenizer: StoredTokenizer) -> Iterator[str]:
    """Every piece of the vocabulary that is text, as a word of its own and in a row with its
    neighbours.
    """
    pieces = (tokenizer.decode_bytes([index]) for index in range(tokenizer.vocab_size))
    words = [
        text
        for piece in pieces
        if "\ufffd" not in (text := piece.decode("utf-8", errors="replace"))
    ]
    for start in range(0, len(words), 4000):
        some = words[start : start + 4000]
        yield "\n".join(some)
        yield "".join(some[::3])


def _random(tokenizer: StoredTokenizer) -> Iterator[str]:
    """Random mixtures, the same every time."""
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
