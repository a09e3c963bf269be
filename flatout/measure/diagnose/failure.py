"""Why a run could not be measured: its error as evidence, with the line of the user's code."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.errors import DataError, FlatoutError, MissingPackage, OutOfMemory, RunFailed
from flatout.measure.steps.evidence import Failure
from flatout.measure.steps.lines import read_stacks, site_at, site_of, user_line

LONGEST = 300
"""Messages are truncated to this many characters."""
KINDS: dict[type[BaseException] | tuple[type[BaseException], ...], str] = {
    (MissingPackage, ModuleNotFoundError): "missing-package",
    (OutOfMemory, MemoryError): "out-of-memory",
    DataError: "no-data",
}
"""Kinds of failure by the class of the error."""


def failure_of(
    error: BaseException, step: int, figures: Sequence[tuple[int, dict[str, float]]] = ()
) -> Failure:
    """Return an error of a run as evidence; `figures` are those that it has read back."""
    message, fix = _told(error)
    kind = next((kind for types, kind in KINDS.items() if isinstance(error, types)), "error")
    if isinstance(error, RunFailed) and _diverged(figures):
        kind = "diverged"
    known = {"kind": kind, "message": message, "fix": fix, "step": step, "site": site_of(error)}
    return Failure.model_validate(known)


def hanging(thread: int, seconds: float) -> Failure:
    """Return the evidence of a thread that has not finished, with the line at which it is."""
    site = site_at(user_line(read_stacks().get(thread, ())))
    return Failure(kind="hang", message=f"The run had not ended after {seconds:.0f} s.", site=site)


def _told(error: BaseException) -> tuple[str, str | None]:
    if isinstance(error, FlatoutError):
        return error.what, error.fix
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return (
            f"The package {error.name} is not installed.",
            f"Install it: `pip install {package}`.",
        )
    first = (str(error).strip().splitlines() or [""])[0][:LONGEST]
    return f"{type(error).__name__}: {first}".rstrip(": "), None


def _diverged(figures: Sequence[tuple[int, dict[str, float]]]) -> bool:
    return bool(figures) and not all(math.isfinite(value) for value in figures[-1][1].values())
