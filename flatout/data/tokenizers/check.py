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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from flatout.data.tokenizers.base import NotEncodable, Tokenizer, is_panic
from flatout.data.tokenizers.engine_choice import CORNERS, verdict_path, write_verdict
from flatout.data.tokenizers.engines import versioned
from flatout.errors import DataError
from flatout.process_limits import bound_memory, cpu_bounded, failure_of

CPU_S = 30
"""CPU time to load a tokenizer and encode the trial texts; 256,000 tokens take about 4 s."""
MEMORY_BYTES = 2 << 30
WALL_S = 600
CHECK_VERSION = 1
"""Incremented with every change of the trial."""
LONG_CHARACTERS = 5_000
PIECE_CPU_S = 300
"""CPU time of a prepare worker for one piece of a text, which has at most a million characters."""
PIECE_BYTES = 8 << 30
"""Memory of a prepare worker beyond what it has at the start."""
_REFUSED = 3
"""The exit code of a process that reports an error."""
_PROGRAM = """import sys; sys.path[:] = {path!r}
from flatout.data.tokenizers import try_out; sys.exit(try_out({name!r}, {cpu_s}))"""
_FIX = "Use another tokenizer, or get the file again from where it was published."
_PATTERN_FIX = "Correct --pattern: it must match every part of a text, and never the empty string."


def require_usable(text: bytes, name: str, *, cache: Path | None) -> None:
    """Check that the tokenizer in a JSON text loads and encodes a few texts within the limits.

    Raises: DataError with the reason when it does not.
    """
    versions = [versioned(engine) for engine in ("tokenizers", "tiktoken")]
    facts = [hashlib.sha256(text).hexdigest(), *versions, str(CHECK_VERSION)]
    verdict = verdict_path(cache, "tokenizers", facts)
    if verdict is not None and verdict.is_file():
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
    if tried.returncode == _REFUSED:
        answer = json.loads(tried.stdout)
        raise DataError(answer["what"], fix=answer["fix"])
    if tried.returncode:
        limits = f"the limits are {CPU_S} s and {MEMORY_BYTES >> 30} GiB"
        raise _refused(name, f"it {failure_of(tried.returncode)} ({limits})")
    write_verdict(verdict, {"engines": versions})


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


def try_out_within_limits(
    load: Callable[[], Tokenizer], name: str, strings: Iterable[str], cpu_s: float
) -> int:
    """Load a tokenizer and encode texts within limits; print any error, and return the exit code.

    Some of the texts are built from `strings`, which come from the file itself.
    """
    bound_memory(MEMORY_BYTES)
    with cpu_bounded(cpu_s):
        try:
            _try_out(load(), name, strings)
        except DataError as error:
            print(json.dumps({"what": error.what, "fix": error.fix}))
            return _REFUSED
    return 0


def _try_out(tokenizer: Tokenizer, name: str, strings: Iterable[str]) -> None:
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
                f"The pattern of the tokenizer {name} leaves out text: {text[:20]!a} is decoded "
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
