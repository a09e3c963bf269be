"""Reads what a run directory recorded. Nothing in it is trusted, and damage becomes a note.

A directory without config.yaml is read too, if it has a metrics.jsonl: other training loops write
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TypeVar

from flatout.config.documents import read_document
from flatout.config.schema import flat
from flatout.errors import FlatoutError
from flatout.progress import counted
from flatout.storage.json_io import JsonObject, LineReader, finite_numbers, is_finite
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import run_state

Read = TypeVar("Read")
LAST_STEP = 2**53
"""Later steps are damage: arithmetic with them is not exact, or overflows."""
WATCHED = "watched"
"""The state of a directory without config.yaml, which another training loop wrote."""


def typical(values: Sequence[float]) -> float | None:
    """Return the median of a metric's records without the first, which includes the warm-up."""
    return float(median(values[1:] if len(values) > 1 else values)) if len(values) else None


class RunLog:
    """What a run directory recorded. `notes` lists what was damaged in the files that were read."""

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        """Read the lines of files whole, or only their last `tail_bytes`."""
        self.path = path
        self.notes: list[str] = []
        self.is_readable = True
        """Whether the files with lines could be opened."""
        self._tail_bytes = tail_bytes

    @cached_property
    def state(self) -> str:
        """As `flatout runs` shows it, or WATCHED."""
        if not (self.path / layout.CONFIG).exists():
            return WATCHED
        return self._or_note(lambda: str(run_state(self.path)), "damaged")

    def lines(self) -> Iterator[JsonObject]:
        """Yield the lines of metrics.jsonl that state a step, as they are."""
        without = 0
        for line in self._read(layout.METRICS):
            step = line.get("step")
            if is_finite(step) and abs(step) <= LAST_STEP:
                yield line
            else:
                without += 1
        if without:
            records = counted(without, "record")
            self.notes.append(f"{records} of metrics.jsonl without a step, skipped.")

    def records(self) -> Iterator[dict[str, float]]:
        """Yield the finite numbers of each line of metrics.jsonl that states a step."""
        return map(finite_numbers, self.lines())

    @cached_property
    def events(self) -> list[JsonObject]:
        """The lines of events.jsonl. Each names its kind, and may lack every other field."""
        return [line for line in self._read(layout.EVENTS) if isinstance(line.get("event"), str)]

    @cached_property
    def settings(self) -> JsonObject:
        """config.yaml under dotted keys. Empty when it is missing or damaged."""
        if self.state == WATCHED:
            return {}
        return self._or_note(lambda: flat(read_document(self.path / layout.CONFIG)), {})

    @cached_property
    def summary(self) -> JsonObject:
        """summary.json. Empty while the run has not finished."""
        return self._or_note(lambda: layout.read_summary(self.path), None) or {}

    def _read(self, name: str) -> Iterator[JsonObject]:
        reader = LineReader(self.path / name, tail_bytes=self._tail_bytes)
        try:
            yield from reader.read()
        except FlatoutError as error:
            self.notes.append(error.what)
            self.is_readable = False
        is_growing = reader.is_cut_off and self.state == "running"
        self.notes += reader.notes(is_growing=is_growing)

    def _or_note(self, read: Callable[[], Read], default: Read) -> Read:
        """Return what `read` returns. After an error of ours `default`, and the error as a note."""
        try:
            return read()
        except FlatoutError as error:
            self.notes += [] if error.what in self.notes else [error.what]
            return default
