"""Shared by local and Ray workers: setup, failures as plain data, and records in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from flatout.data.prepare.pack.jobs import Range
from flatout.data.prepare.pack.records import RangeRecord
from flatout.data.prepare.pack.tokenize import Packing, Report
from flatout.errors import FlatoutError, RunFailed

T = TypeVar("T")

RESUMES = "Run the same command again: it continues where it stopped."


@dataclass(frozen=True)
class Setup:
    """Sent to each worker once."""

    packing: Packing
    folder: Path
    """Directory to which ranges are written."""


@dataclass(frozen=True)
class Failure:
    """An error in a worker as plain text: not every exception can be pickled."""

    what: str
    fix: str = ""
    kind: type[FlatoutError] | None = None
    trace: str = ""

    def error(self) -> Exception:
        """Return the exception to raise in the caller."""
        kind = self.kind or RunFailed
        what, fix = self.what, self.fix
        if self.kind is None:
            what = f"A worker of prepare failed: {what}."
            fix = "The traceback above names the line; --workers 1 shows it in one process."
        error = kind(what, fix=fix)
        if self.trace:
            error.add_note(self.trace)
        return error


class Workers(Protocol):
    """Packs ranges, on this machine or elsewhere."""

    def pack(
        self, ranges: Sequence[Range], setup: Setup, report: Report = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the ranges and yield their records in order.

        Raises: DataError for the first bad row in the order of the ranges.
        """
        ...


Answer = tuple[int, RangeRecord | Failure]
"""The index of a finished range, and its result."""


def in_order(
    ranges: Sequence[Range],
    submit: Callable[[Sequence[Range], int], int],
    collect: Callable[[], Iterable[Answer]],
) -> Iterator[RangeRecord]:
    """Yield the records of ranges in order, whatever order they finish in.

    `submit(ranges, submitted)` submits ranges from that index while workers have room, and returns
    the next index; `collect()` waits for some to finish. Nothing is submitted after a range that
    failed.

    Raises: the error of the first range that failed.
    """
    done: dict[int, RangeRecord | Failure] = {}
    submitted, stop = 0, len(ranges)
    for wanted in range(len(ranges)):
        while wanted not in done:
            submitted = submit(ranges[:stop], submitted)
            for index, result in collect():
                done[index] = result
                if isinstance(result, Failure):
                    stop = min(stop, index + 1)
        result = done.pop(wanted)
        if isinstance(result, Failure):
            raise result.error()
        yield result


def attempt(call: Callable[[], T]) -> T | Failure:
    """Return the result of a call, or its failure."""
    try:
        return call()
    except FlatoutError as error:
        return Failure(error.what, error.fix, type(error))
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", trace=traceback.format_exc())
