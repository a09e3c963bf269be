"""One file from a public address: goes on where it broke off, checked against its SHA-256, whole or
absent.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

from flatout.errors import DataError
from flatout.files import unless_broken
from flatout.progress import SILENT, Progress, Task

_BLOCK = 1 << 18
_ATTEMPTS = 5


def download(
    address: str,
    target: Path,
    *,
    sha256: str,
    num_bytes: int | None = None,
    progress: Progress = SILENT,
    pause_s: float = 0.5,
    timeout_s: float = 30.0,
) -> Path:
    """Return `target` holding the file at `address`; nothing is fetched when it is there already.

    A broken connection is taken up again where it broke; what was fetched stays in `target.part`
    for the next call. `pause_s` is the wait before the second attempt; it doubles each time.

    Raises: DataError when the address does not answer, or gives another file than the checksum
            says.
    """
    if target.is_file() and file_sha256(target) == sha256:
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with progress.task(
            f"Downloading {address}", total=num_bytes and num_bytes / 1e6, unit="MB"
        ) as task:
            went_on = _fetch_all(address, part, task, pause_s, timeout_s)
            if went_on and file_sha256(part) != sha256:
                task.note("what lay here from before does not fit; once more from the start")
                part.unlink()
                _fetch_all(address, part, task, pause_s, timeout_s)
        found = file_sha256(part)
        if found != sha256:
            part.unlink()
            raise DataError(
                f"{address} gave a file with SHA-256 {found}, not {sha256}.",
                fix="The file there has changed: pass the right one with --from FILE.",
            )
        part.replace(target)
    except OSError as error:
        raise DataError(
            f"Cannot write {error.filename or part}: {error.strerror or error}.",
            fix=unless_broken(error, "Make room, or pass the file with --from."),
        ) from error
    return target


def _fetch_all(address: str, part: Path, task: Task, pause_s: float, timeout_s: float) -> bool:
    """Fetch to the end in a few attempts, and return whether the first one went on from an older
    beginning.
    """
    went_on = part.is_file() and part.stat().st_size > 0
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _fetch(address, part, task, timeout_s)
            return went_on
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:
                part.unlink(missing_ok=True)
                problem = "has less than was fetched before"
            elif error.code < 500 and error.code != 429:
                raise unreachable(address, f"answers {error.code} {error.reason}", part) from error
            else:
                problem = f"answers {error.code} {error.reason}"
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            ConnectionError,
            TimeoutError,
            ssl.SSLError,
        ) as error:
            problem = f"cannot be reached ({getattr(error, 'reason', None) or error})"
        if attempt < _ATTEMPTS:
            task.note(f"{problem}; attempt {attempt + 1} of {_ATTEMPTS}")
            time.sleep(pause_s * 2 ** (attempt - 1))
    raise unreachable(address, problem, part)


def unreachable(address: str, problem: str, part: Path) -> DataError:
    """Return the error for an address that does not give its file."""
    kept = (
        f" The first {part.stat().st_size:,} bytes are kept: the next call goes on from there."
        if part.is_file()
        else ""
    )
    return DataError(
        f"{address} {problem}.{kept}",
        fix="Check the network and try again, or pass the file with --from FILE.",
    )


def _fetch(address: str, part: Path, task: Task, timeout_s: float) -> None:
    """Fetch the rest of the file once.

    Raises: ConnectionError when the answer is shorter than it said.
    """
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "flatout"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        goes_on = answer.status == 206 and (answer.headers.get("Content-Range") or "").startswith(
            f"bytes {have}-"
        )
        expected = int(answer.headers.get("Content-Length") or -1)
        done = 0
        with part.open("ab" if goes_on else "wb") as file:
            while block := answer.read(_BLOCK):
                file.write(block)
                done += len(block)
                task.advance(len(block) / 1e6)
    if 0 <= expected != done:
        raise ConnectionError(f"broke off after {done:,} of {expected:,} bytes")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, sha256: str) -> None:
    """Check a file of the user's own against a card's checksum.

    Raises: DataError when it cannot be read or is another file.
    """
    try:
        found = file_sha256(path)
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}.", fix="Check the path given with --from."
        ) from error
    if found != sha256:
        raise DataError(
            f"{path} has SHA-256 {found}, not {sha256}.",
            fix="Give the very file, or prepare it under its own path without --from.",
        )
