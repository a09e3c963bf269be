"""Chooses the fastest engine whose ids equal those of the reference engine.

They are compared on strings designed to reveal differences, and on text of the corpus. The result
on the strings is cached per tokenizer and engine versions; the comparison on the corpus runs every
time. An engine that is missing, fails or differs is skipped with a message; it is never an error.
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

from flatout.data.tokenizers.base import Ids, Tokenizer
from flatout.data.tokenizers.engines import versioned
from flatout.errors import DataError, FlatoutError
from flatout.progress import Progress

WORTHWHILE_CHARACTERS = 4_000_000
"""With less text, encoding takes less time than finding a faster engine."""
CHECKED_CHARACTERS = 256_000
"""Approximate amount of text to compare engines on, spread evenly over the sample."""
CHUNK_CHARACTERS = 4096
PROBES_VERSION = 1
"""Incremented with every change of `probes`, which invalidates cached results."""
SHOWN_CHARACTERS = 20

_SAMPLED_FROM = 0x20000
"""Beyond this code point Unicode is mostly ideographs, of which a sample is enough."""
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
_LONG = ("a", "ab", " ", "\n", " \n", "é", "1", ".", "🙂", "\u0301", "aB", "日")
_LONG_CHARACTERS = 20_000
_VERY_LONG_CHARACTERS = 100_000


def choose_engine(
    tokenizer: Tokenizer, sample: Iterable[str], *, cache: Path | None, progress: Progress
) -> Tokenizer:
    """Return the tokenizer with the fastest engine that gives its ids, and report the choice.

    `sample` yields text of the corpus. With less than WORTHWHILE_CHARACTERS of it, the tokenizer is
    returned unchanged. `cache` is the directory of cached results; None disables the cache.
    """
    texts = _spread(sample) if tokenizer.engines else []
    if not texts:
        return tokenizer
    *faster, slowest = tokenizer.engines
    reference = tokenizer.with_engine(slowest)
    skipped: list[str] = []
    for engine in faster:
        candidate = reference.with_engine(engine)
        try:
            name = versioned(engine)
            candidate.encode_piece("", 0)
            reason = _cached_difference(candidate, reference, cache) or difference(
                candidate, reference, texts
            )
        except FlatoutError as error:
            reason = error.what.rstrip(".")
        if not reason:
            size = sum(len(text.encode()) for text in texts) / 1e6
            same = f"encodes with {name} (same ids as {slowest} on {size:.1f} MB of this text)."
            progress.say(_sentence(skipped, same))
            return candidate
        skipped.append(reason)
    progress.say(_sentence(skipped, f"encodes with {slowest}."))
    return reference


def _sentence(skipped: list[str], choice: str) -> str:
    return "; ".join(skipped) + f": {choice}" if skipped else choice[0].upper() + choice[1:]


def _spread(sample: Iterable[str]) -> list[str]:
    """Return evenly spread chunks of the sample; none when it is too small.

    Halves of surrogate pairs are dropped here: packing reports them.
    """
    chunks: list[str] = []
    size = 0
    for text in sample:
        size += len(text)
        starts = range(0, len(text), CHUNK_CHARACTERS)
        chunks += (text[start : start + CHUNK_CHARACTERS] for start in starts)
    if size < WORTHWHILE_CHARACTERS:
        return []
    step = max(size // CHECKED_CHARACTERS, 1)
    return [chunk.encode(errors="ignore").decode() for chunk in chunks[::step]]


def difference(candidate: Tokenizer, reference: Tokenizer, texts: Iterable[str]) -> str:
    """Return a description of the first difference in the ids of two engines; empty if none."""
    differs = f"{candidate.engine} differs from {reference.engine} at "
    for text in texts:
        expected, actual = _ids_or_error(reference, text), _ids_or_error(candidate, text)
        if isinstance(expected, str) or isinstance(actual, str):
            if type(expected) is not type(actual):
                reason = actual
                if not isinstance(actual, str):
                    reason = f"it does not fail, and {reference.engine} does: {expected}"
                return f"{differs}{text[:SHOWN_CHARACTERS]!a} ({reason})"
        elif not np.array_equal(expected, actual):
            size = min(len(expected), len(actual))
            same = int(np.argmin(np.append(expected[:size] == actual[:size], False)))
            near = len(reference.decode(expected[:same].tolist()))
            shown = text[max(near - SHOWN_CHARACTERS // 2, 0) : near + SHOWN_CHARACTERS // 2]
            return f"{differs}{shown!a}"
    return ""


def _ids_or_error(tokenizer: Tokenizer, text: str) -> Ids | str:
    """Return the ids, or the error as text.

    Panics, which are not Exceptions, are caught too: a slower engine may still encode the text.
    """
    try:
        return tokenizer.encode_piece(text, 0)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except DataError as error:
        return error.what.rstrip(".")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _cached_difference(candidate: Tokenizer, reference: Tokenizer, cache: Path | None) -> str:
    """Return `difference` on the probes, from the cache if possible."""
    versions = [
        versioned(candidate.engine),
        versioned(reference.engine),
        unicodedata.unidata_version,
        str(PROBES_VERSION),
    ]
    path = verdict_path(cache, "engines", [reference.digest(), *versions])
    try:
        cached = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):
        cached = {}
    if isinstance(cached, dict) and isinstance(cached.get("difference"), str):
        return str(cached["difference"])
    result = difference(candidate, reference, probes(reference))
    write_verdict(path, {"engines": versions, "difference": result})
    return result


def verdict_path(cache: Path | None, directory: str, facts: Iterable[str]) -> Path | None:
    """Return the path of the cached result for `facts`, or None without a cache."""
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return None if cache is None else cache.expanduser() / directory / f"{key[:32]}.json"


def write_verdict(path: Path | None, verdict: dict[str, object]) -> None:
    """Write a result to the cache; if that fails, it is computed again next time."""
    if path is None:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(verdict) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


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


def _vocabulary(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield every piece of the vocabulary that is text, alone and next to its neighbours."""
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
