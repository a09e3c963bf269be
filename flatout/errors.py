"""All errors of flatout. Each describes what happened and how to fix it.

FlatoutError
├── UsageError            exit 2: the command, the config or the input is wrong
│   ├── ConfigError       a wrong key or value, or two values that contradict each other
│   ├── DataError         an unusable text, dataset or tokenizer
│   │   ├── TooLittleText   too few documents or too little text
│   │   └── OutputInUse     the output path contains something else
│   ├── CheckpointError   an unusable run directory or checkpoint
│   ├── UntrustedCode     a run from elsewhere names code to import that the user has not allowed
│   ├── HardwareError     this machine cannot do what was requested
│   ├── ShapeError        tensors with incompatible shapes
│   └── MissingPackage    an optional package is not installed
├── RunFailed             exit 1: the run failed
│   ├── Diverged          the loss or the gradients are not finite
│   ├── OutOfMemory       the device or the host has too little memory
│   │   └── SmallerBatch    exit 76 of one of several processes: the next start has fewer rows
│   └── DiskFull          the disk has no room for a checkpoint
├── Stopped               exit 75: stopped and saved, run the same command again
└── Interrupted           exit 128 + signal: stopped before anything could be saved
"""

from __future__ import annotations

import copyreg
import importlib
import re
import shlex
import signal
from typing import Any

_SCHEME = re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*:(?://+|/(?=[^/\s]*:[^/\s]*@)))")
"""The start of a URL. A Path made from a URL has one slash."""
_USER = re.compile(r"(?i)[^\s:]*:\S*@|[^/\n@:]*:(?!\d+\b)[^\n]*?@")
"""User and password: one word up to its last `@`, or several words."""
_WEB_USER = re.compile(r"[^\s@/]*@")
_QUERY = re.compile(r"""([^\s?'"]*|[^?'"\n]*(?=\?[^\s'"]*=))\?([^\s'"]*)""")


def without_secrets(text: str) -> str:
    """Return `text` with user, password and web query removed from its URLs."""
    before, *found = _SCHEME.split(text)
    return before + "".join(
        scheme + _bare(scheme, rest) for scheme, rest in zip(found[::2], found[1::2], strict=True)
    )


def _bare(scheme: str, rest: str) -> str:
    """Return the text between one URL scheme and the next, without secrets."""
    rest = _past(_USER, rest)
    if "http" in scheme.lower():
        rest = _past(_WEB_USER, rest)
        if query := _QUERY.match(rest):
            closing = query[2][len(query[2].rstrip(".,:;)")) :]
            rest = query[1] + closing + rest[query.end() :]
    return rest


def _past(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.match(text)
    return text[found.end() :] if found else text


def on_one_line(text: str) -> str:
    """Return `text` with control characters escaped, so that a name cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_shell(word: object) -> str:
    """Return `word` quoted for a command that the user can paste into a shell."""
    return shlex.quote(str(word))


class FlatoutError(Exception):
    """Something the user can fix. Reads as: what happened, then the fix.

    `what` describes what is wrong and `fix` what to do about it. Both are complete sentences on one
    line, with secrets removed from URLs.
    """

    exit_code = 1
    advice = "Fix"
    """The word before `fix`. `Next` when nothing is wrong."""

    def __init__(self, what: str, *, fix: str) -> None:
        self.what = on_one_line(without_secrets(what))
        self.fix = on_one_line(without_secrets(fix))
        super().__init__(f"{self.what} {self.advice}: {self.fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what `__init__` has made of its arguments, and the notes."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class UsageError(FlatoutError):
    """The command, the config or the input is wrong. Nothing was changed."""

    exit_code = 2


class ConfigError(UsageError):
    """A config key or value is wrong, or two values contradict each other."""


class DataError(UsageError):
    """A text, dataset or tokenizer cannot be used."""


class TooLittleText(DataError):
    """There are too few documents, or too little text, for the requested dataset."""


class OutputInUse(DataError):
    """The output path of a dataset contains something else."""


class CheckpointError(UsageError):
    """A run directory or checkpoint cannot be used."""


class UntrustedCode(UsageError):
    """A run directory names code that the user has not allowed. Nothing was imported."""


class HardwareError(UsageError):
    """This machine cannot do what was requested."""


class ShapeError(UsageError):
    """Tensors have incompatible shapes."""


class MissingPackage(UsageError):
    """An optional package is not installed. The fix is its install line."""


class RunFailed(FlatoutError):
    """The run failed. What was saved before stays intact."""


class Diverged(RunFailed):
    """Training has diverged: losses or gradients are not finite. Earlier checkpoints are whole."""


class OutOfMemory(RunFailed):
    """The device, or the machine, has too little memory for the run."""


class SmallerBatch(OutOfMemory):
    """The run ran out of memory, and its directory has a smaller micro-batch for the next attempt.

    Several processes must start again: the others wait inside a collective for the one that failed.
    """

    exit_code = 76


class DiskFull(RunFailed):
    """The disk has no room for a checkpoint. Those that exist stay intact."""


class Stopped(FlatoutError):
    """Stopped on request after saving. The same command resumes."""

    exit_code = 75
    advice = "Next"


class Interrupted(FlatoutError):
    """Stopped before anything could be saved. The exit code is 128 + the signal's number."""

    advice = "Next"

    def __init__(self, what: str, *, fix: str, signal_number: int) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = 128 + signal_number


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 interrupts the process, as Ctrl+C does with KeyboardInterrupt.

    Not an Exception: code that handles errors must not catch it.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


def kind_of(error: FlatoutError) -> str:
    """Return the name of an error's class in this file, for another process to raise it again.

    For a class defined elsewhere, it is the class here from which that one is derived.
    """
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def signal_of(interruption: BaseException) -> int:
    """Return the number of the signal that raised an exception. The default is SIGINT."""
    if isinstance(interruption, Interrupted):
        return interruption.exit_code - 128
    if isinstance(interruption, Terminated):
        return interruption.signal_number
    return signal.SIGINT


def require_posix() -> None:
    """Check that this system has the file locks that runs and datasets need.

    Raises: HardwareError on Windows.
    """
    try:
        importlib.import_module("fcntl")
    except ImportError as error:
        raise HardwareError(
            "flatout needs Linux or macOS, and this Python runs on a different system.",
            fix="On Windows, install WSL, and flatout in it: `wsl --install -d Ubuntu` in "
            "PowerShell, restart, and in Ubuntu `sudo apt update && sudo apt install -y git "
            "build-essential python3-venv`, `git clone URL flatout && cd flatout`, `python3 -m "
            "venv .venv/flatout && . .venv/flatout/bin/activate`, and `pip install -c "
            "constraints.txt '.[report]'`.",
        ) from error
