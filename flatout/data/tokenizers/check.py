"""A tokenizer file of unknown kind is first tried out in a process of its own, with limits on CPU
time and memory.

Its regular expressions may backtrack without end, its normalizers may double a text over and over,
and damage in it may end the process. What passes is kept by the file's digest. Trying proves
nothing about other text, so the workers of prepare have limits too.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flatout.data.tokenizers.base import NotEncodable, StoredTokenizer, is_panic
from flatout.data.tokenizers.engine_choice import CORNERS, keep
from flatout.data.tokenizers.engines import described
from flatout.data.tokenizers.process_limits import bound_memory, cpu_bounded, end_of
from flatout.errors import DataError

CPU_S = 30
"""CPU time that loading a tokenizer and encoding the texts it is tried on may take; one of 256,000
tokens takes about 4 s.
"""
MEMORY_BYTES = 2 << 30
WALL_S = 600
CHECK_VERSION = 1
"""Counts up with every change of what is tried."""
LONG_CHARACTERS = 5_000
PIECE_CPU_S = 300
"""CPU time that a worker of prepare may take for one piece of a text, which has at most a million
characters,
"""
PIECE_BYTES = 8 << 30
"""and the memory that it may take on top of what it has at first."""
OWN_TEXTS = 256
"""So many strings of the file itself are among the texts."""
_REFUSED = 3
"""The exit code of a process that says what is wrong."""
_BOOT = "import sys; sys.path[:] = {path!r}; from flatout.data.tokenizers import try_out; sys.exit(try_out({name!r}, {cpu_s}))"
_FIX = "Use another tokenizer, or get the file again from where it was published."
_PATTERN_FIX = "Correct --pattern: it has to match every part of a text, and never nothing."


def require_usable(text: bytes, name: str, *, cache: Path | None) -> None:
    """Do nothing when the tokenizer in the text of a JSON file can be loaded and encodes a few
    texts within the limits.

    Raises: DataError saying what is wrong with it.
    """
    versions = [described(engine) for engine in ("tokenizers", "tiktoken")]
    key = hashlib.sha256(
        "\n".join([hashlib.sha256(text).hexdigest(), *versions, str(CHECK_VERSION)]).encode()
    ).hexdigest()
    kept = cache.expanduser() / "tokenizers" / f"{key[:32]}.json" if cache is not None else None
    if kept is not None and kept.is_file():
        return
    boot = _BOOT.format(path=sys.path, name=name, cpu_s=CPU_S)
    try:
        tried = subprocess.run(
            [sys.executable, "-c", boot],
            input=text,
            capture_output=True,
            check=False,
            timeout=WALL_S,
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(name, f"it takes more than {WALL_S} s") from error
    if tried.returncode == _REFUSED:
        said = json.loads(tried.stdout)
        raise DataError(said["what"], fix=said["fix"])
    if tried.returncode:
        limits = f"the limits are {CPU_S} s and {MEMORY_BYTES >> 30} GiB"
        raise _refused(name, f"it {end_of(tried.returncode)} ({limits})")
    if kept is not None:
        keep(kept, {"engines": versions})


def _refused(name: str, why: str, fix: str = _FIX) -> DataError:
    return DataError(
        f"{name} cannot be used: loading it and encoding a few short texts fails: {why}.", fix=fix
    )


def bound_pieces(tokenizer: object) -> None:
    """Let the system end this process when a tokenizer that is not proven takes too long for a
    piece of text, or too much memory.
    """
    if isinstance(tokenizer, StoredTokenizer) and not tokenizer.proven:
        bound_memory(PIECE_BYTES)
        tokenizer.bounds = partial(cpu_bounded, PIECE_CPU_S)


def try_out_within_limits(
    load: Callable[[], StoredTokenizer], name: str, strings: Iterable[str], cpu_s: float
) -> int:
    """Load a tokenizer and encode texts, some of them from the file's own `strings`, within limits;
    print what is wrong, and return the exit code.
    """
    bound_memory(MEMORY_BYTES)
    with cpu_bounded(cpu_s):
        try:
            _try_out(load(), name, strings)
        except DataError as error:
            print(json.dumps({"what": error.what, "fix": error.fix}))
            return _REFUSED
    return 0


def _try_out(tokenizer: StoredTokenizer, name: str, strings: Iterable[str]) -> None:
    fix = _PATTERN_FIX if tokenizer.splits_all_text else _FIX
    for text in _texts(strings):
        try:
            ids = tokenizer.encode(text)
        except NotEncodable as error:
            if error.__cause__ is not None and is_panic(error.__cause__):
                said = str(error.__cause__).partition("\n")[0].rstrip(".")
                raise _refused(
                    name, f"the library that encodes stopped at an error of its own ({said})", fix
                ) from error
            continue
        back = tokenizer.decode(ids)
        if tokenizer.splits_all_text and back != text:
            raise DataError(
                f"The pattern of the tokenizer {name} leaves out text: {text[:20]!a} comes back as {back[:20]!a}.",
                fix=fix,
            )


def _texts(strings: Iterable[str]) -> Iterator[str]:
    yield from CORNERS
    yield " ".join(CORNERS)
    for own in strings:
        yield own
        yield own * (LONG_CHARACTERS // max(len(own), 1)) + "\x00"
    for piece in ("a", "ab", " ", "\n", "1", ".", "é", "日", "a ", "A", "\t"):
        yield piece * (LONG_CHARACTERS // len(piece)) + "!"


def strings_in(definition: Any) -> Iterator[str]:
    """Yield the first strings of a part of a tokenizer.json, cut to what may stand in a text."""
    waiting = [definition]
    left = OWN_TEXTS
    while waiting and left:
        found = waiting.pop(0)
        if isinstance(found, str) and 0 < len(found) <= LONG_CHARACTERS:
            left -= 1
            yield found.encode(errors="ignore").decode()
        elif isinstance(found, dict | list):
            waiting += found.values() if isinstance(found, dict) else found
