"""Why a run could not be measured: its error as evidence, with the line of the user's code."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence

from flatout.errors import DataError, FlatoutError, MissingPackage, OutOfMemory, RunFailed
from flatout.measure.evidence import CallSite, Failure
from flatout.measure.sampling import is_user_code, line_of, read_stacks, user_line

LONGEST = 300
"""Messages are truncated to this many characters."""


def failure_of(
    error: BaseException, step: int, figures: Sequence[tuple[int, dict[str, float]]] = ()
) -> Failure:
    """Return an error of a run as evidence; `figures` are those that it has read back."""
    site = _site(error)
    if isinstance(error, MissingPackage):
        return Failure(
            kind="missing-package", message=error.what, fix=error.fix, step=step, site=site
        )
    if isinstance(error, (OutOfMemory, MemoryError)):
        message, fix = _told(error)
        return Failure(kind="out-of-memory", message=message, fix=fix, step=step, site=site)
    if isinstance(error, DataError):
        return Failure(kind="no-data", message=error.what, fix=error.fix, step=step, site=site)
    if isinstance(error, ModuleNotFoundError):
        return Failure(
            kind="missing-package",
            message=f"The package {error.name} is not installed.",
            fix=f"Install it: `pip install {(error.name or '').partition('.')[0]}`.",
            step=step,
            site=site,
        )
    message, fix = _told(error)
    if isinstance(error, RunFailed) and _diverged(figures):
        return Failure(kind="diverged", message=message, fix=fix, step=step)
    return Failure(kind="error", message=message, fix=fix, step=step, site=site)


def hanging(thread: int, seconds: float) -> Failure:
    """Return the evidence of a thread that has not finished, with the line at which it is."""
    found = user_line(read_stacks().get(thread, ()))
    site = found and CallSite(file=found[0], line=found[1], text=line_of(*found))
    return Failure(
        kind="hang", message=f"The run had not ended after {seconds:.0f} s.", site=site or None
    )


def _told(error: BaseException) -> tuple[str, str | None]:
    if isinstance(error, FlatoutError):
        return error.what, error.fix
    first = (str(error).strip().splitlines() or [""])[0][:LONGEST]
    return f"{type(error).__name__}: {first}".rstrip(": "), None


def _diverged(figures: Sequence[tuple[int, dict[str, float]]]) -> bool:
    return bool(figures) and not all(math.isfinite(value) for value in figures[-1][1].values())


def _site(error: BaseException) -> CallSite | None:
    """Return the innermost line of user code in the error's traceback, or None."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)
    ]
    if not frames or frames[-1].lineno is None:
        return None
    last = frames[-1]
    return CallSite(file=last.filename, line=last.lineno or 0, text=(last.line or "").strip())
