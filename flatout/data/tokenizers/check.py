"""Tries out an unproven tokenizer file in another process, with limits on CPU time and memory.

Its regular expressions may backtrack endlessly, its normalisers may double a text again and again,
and a damaged file may crash the process. The digest of a file that passes is cached. The trial
proves nothing about other texts, so the workers of prepare have limits too.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from flatout.data.tokenizers.base import NotEncodable, Tokenizer, is_panic
from flatout.data.tokenizers.engines import versioned
from flatout.errors import DataError
from flatout.storage.process_limits import bound_memory, cpu_bounded, failure_of

CPU_S = 30
"""CPU time to load a tokenizer and encode the trial texts. 256,000 tokens take about 4 s."""
MEMORY_BYTES = 2 << 30
WALL_S = 600
CHECK_VERSION = 1
"""Incremented with every change of the trial."""
LONG_CHARACTERS = 5_000
PIECE_CPU_S = 300
"""CPU time of a prepare worker for one piece of a text, which has at most a million characters."""
PIECE_BYTES = 8 << 30
"""Memory of a prepare worker beyond what it has at the start."""
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
REFUSED = 3
"""The exit code of a process that reports an error."""
_PROGRAM = """import sys; sys.path[:] = {path!r}
from flatout.data.tokenizers import try_out; sys.exit(try_out({name!r}, {cpu_s}))"""
_FIX = "Use a different tokenizer, or get the file again from where it was published."
_PATTERN_FIX = "Correct --pattern: it must match every part of a text, and never the empty string."


def require_usable(text: bytes, name: str, *, cache: Path | None) -> None:
    """Check that the tokenizer in a JSON text loads and encodes a few texts within the limits.

    Raises: DataError with the reason when it does not.
    """
    versions = [versioned(engine) for engine in ("tokenizers", "tiktoken")]
    verdict = None
    if cache is not None:
        verdict = verdict_path(cache, hashlib.sha256(text).hexdigest(), *versions)
        if verdict.is_file():
            return
    program = _PROGRAM.format(path=sys.path, name=name, cpu_s=CPU_S)
    try:
        tried = subprocess.run(
            [sys.executable, "-c", program],
            input=text,
            capture_output=True,
            check=False,
            timeout=WALL_S,
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(name, f"it takes more than {WALL_S} s") from error
    if tried.returncode == REFUSED:
        answer = json.loads(tried.stdout)
        raise DataError(answer["what"], fix=answer["fix"])
    if tried.returncode:
        limits = f"the limits are {CPU_S} s and {MEMORY_BYTES >> 30} GiB"
        raise _refused(name, f"it {failure_of(tried.returncode)} ({limits})")
    if verdict is not None:
        keep_verdict(verdict, versions)


def verdict_path(cache: Path, *facts: str) -> Path:
    """Return the path of the file that exists once a check of these facts has passed."""
    key = hashlib.sha256("\n".join([*facts, str(CHECK_VERSION)]).encode()).hexdigest()
    return cache.expanduser() / "tokenizers" / f"{key[:32]}.json"


def keep_verdict(verdict: Path, versions: Sequence[str]) -> None:
    """Write the file of a check that has passed, if the cache is writable."""
    with suppress(OSError):  # the check runs again next time
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.write_text(json.dumps({"engines": versions}) + "\n", encoding="utf-8")


def _refused(name: str, why: str, fix: str = _FIX) -> DataError:
    return DataError(
        f"{name} cannot be used: loading it and encoding a few short texts fails: {why}.", fix=fix
    )


def bound_pieces(tokenizer: object) -> None:
    """Limit the CPU time and memory of this process per piece, unless the tokenizer is proven.

    The operating system ends the process when it exceeds a limit.
    """
    if isinstance(tokenizer, Tokenizer) and not tokenizer.proven:
        bound_memory(PIECE_BYTES)
        tokenizer.limits = partial(cpu_bounded, PIECE_CPU_S)


def encode_texts(tokenizer: Tokenizer, strings: Iterable[str], name: str) -> None:
    """Encode a few texts, some of them built from `strings`, which come from the file itself.

    Raises: DataError when the engine fails, or the pattern omits text.
    """
    fix = _PATTERN_FIX if tokenizer.splits_all_text else _FIX
    for text in _texts(strings):
        try:
            ids = tokenizer.encode(text)
        except NotEncodable as error:
            if error.__cause__ is not None and is_panic(error.__cause__):
                reason = str(error.__cause__).partition("\n")[0].rstrip(".")
                raise _refused(name, f"the engine failed internally ({reason})", fix) from error
            continue
        decoded = tokenizer.decode(ids)
        if tokenizer.splits_all_text and decoded != text:
            raise DataError(
                f"The pattern of the tokenizer {name} omits text: {text[:20]!a} is decoded "
                f"as {decoded[:20]!a}.",
                fix=fix,
            )


def _texts(strings: Iterable[str]) -> Iterator[str]:
    yield from CORNERS
    yield " ".join(CORNERS)
    for string in strings:
        yield string
        yield string * (LONG_CHARACTERS // max(len(string), 1)) + "\x00"
    for piece in ("a", "ab", " ", "\n", "1", ".", "é", "日", "a ", "A", "\t"):
        yield piece * (LONG_CHARACTERS // len(piece)) + "!"
