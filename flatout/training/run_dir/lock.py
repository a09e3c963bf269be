"""The lock of a run directory, in which one process trains at a time. No torch."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from flatout.errors import CheckpointError, RunFailed
from flatout.progress import SILENT, Progress
from flatout.storage.files import (
    LocksUnsupported,
    is_open_at,
    lock,
    open_own,
    refuse_links,
    writing_run,
)
from flatout.training.checkpoint.catalog import CHECKPOINTS, make_folder
from flatout.training.run_dir.layout import CONFIG, EVENTS, LOCK, WRITTEN

_TOKENS: dict[Path, str] = {}
"""What this process wrote into the locks that it holds."""
LOCK_WAIT_S = 1.0
"""How long a starting run waits for the lock. `flatout runs` holds it for an instant to test it."""


@contextmanager
def hold_lock(folder: Path, *, progress: Progress = SILENT) -> Iterator[None]:
    """Hold the lock of a run directory, creating it if necessary. Only rank 0 calls it.

    The system releases the lock when the process ends, however it ends. If no run has started by
    then, the files and directories created for it are deleted.
    Raises: CheckpointError when another process holds the lock (naming it), when a file of the run
            is a link, or when the directory cannot be written.
    """
    try:
        refuse_links([*(folder / name for name in WRITTEN), *(folder / CHECKPOINTS).glob("step-*")])
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        file = _acquire(folder, progress)
    except OSError as error:
        why = "it is a file" if os.path.isfile(folder) else error.strerror
        raise CheckpointError(
            f"The run directory {folder} cannot be written: {why}.",
            fix="Choose one that can be written with --run-dir DIR.",
        ) from error
    token = _TOKENS[folder.absolute()] = secrets.token_hex(8)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    with file:
        try:
            with writing_run(folder):
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), json.dumps(owner | {"token": token}).encode())
            yield
        finally:
            del _TOKENS[folder.absolute()]
            if not (folder / CONFIG).exists():
                _remove_failed_start(folder, missing)


def require_held(folder: Path) -> None:
    """Check that a run directory whose lock this process took is still there, and its own.

    It may have been moved or deleted, or another machine may train there too, where locks are local
    to each. Raises: RunFailed.
    """
    token = _TOKENS.get(folder.absolute())
    if token is None:
        return
    try:
        found = json.loads((folder / LOCK).read_text(encoding="utf-8")).get("token")
    except (OSError, ValueError, AttributeError):
        found = None
    if found == token:
        return
    if folder.exists() and not (folder / LOCK).exists():
        raise RunFailed(
            f"{folder / LOCK} was deleted while the run trained, so another one may train there.",
            fix="Start the same command again: it continues from the last checkpoint.",
        )
    if not folder.exists():
        raise RunFailed(
            f"{folder} was moved or deleted while the run trained.",
            fix="Nothing is written there any more. Where it is now, the same command with "
            "--run-dir DIR continues from its last checkpoint.",
        )
    raise RunFailed(
        f"Another process trains in {folder} too. {in_use(folder).what}",
        fix="Nothing is written there any more. Choose a different directory with --run-dir DIR.",
    )


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run directory."""
    if not (folder / LOCK).exists():
        return False
    with os.fdopen(open_own(folder / LOCK, os.O_RDONLY), "rb") as file:
        try:
            lock(file.fileno(), shared=True)
        except BlockingIOError:
            return True
        except LocksUnsupported:
            pass  # a process that trains here holds no lock either: see _acquire
    return False


def _acquire(folder: Path, progress: Progress) -> FileIO:
    """Return the lock file, open and locked.

    A failed start deletes its lock file, so a process that waited for it tries again on a new one.
    """
    while True:
        make_folder(folder)
        file = FileIO(open_own(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")
        try:
            lock(file.fileno(), wait_s=LOCK_WAIT_S)
        except BlockingIOError:
            file.close()
            raise in_use(folder) from None
        except LocksUnsupported:
            progress.say(
                "This file system has no locks: nothing stops a second process from training in "
                "the same run directory."
            )
        if is_open_at(folder / LOCK, file.fileno()):
            return file
        file.close()


def _remove_failed_start(folder: Path, created: Sequence[Path]) -> None:
    """Delete the files and directories of a start that failed before config.yaml was written."""
    for name in (LOCK,) if folder not in created else (LOCK, EVENTS):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        for path in created:
            path.rmdir()


def in_use(folder: Path) -> CheckpointError:
    """Return the error that names the process which holds the lock of a run directory."""
    try:
        owner = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        who, stop = f"process {owner['pid']} on {owner['host']}", f"kill {int(owner['pid'])}"
    except (ValueError, KeyError, TypeError):
        who, stop = "another process", "kill it"
    return CheckpointError(
        f"{folder} is in use by {who}.",
        fix=f"Wait until it has finished, stop it ({stop}), or choose a different directory with "
        "--run-dir DIR.",
    )
