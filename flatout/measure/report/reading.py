"""Reads what a run directory recorded. Nothing in it is trusted, and damage becomes a note.

A directory without config.yaml is read too, if it has a metrics.jsonl: other training loops write
one. A reader can be asked again while the run continues; it then reads only what is new.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from flatout.config.schema import flat
from flatout.documents import read_document
from flatout.errors import FlatoutError
from flatout.json_io import LineReader, read_json
from flatout.training.run_dir import layout
from flatout.training.run_dir.state import run_state

Array = np.ndarray[Any, np.dtype[np.float64]]
POSITIONS = ("step", "tokens", "elapsed_s")
"""What a curve can be drawn against."""
FINDINGS = "findings.json"
WATCHED = "watched"
"""The state of a directory without config.yaml, which another training loop wrote."""
NUMBERS = {int, float, NoneType}
"""Types of a figure; null is a value that was not finite."""
MAX_EVENTS = 20_000
"""Events beyond this number are counted and left out."""


@dataclass(frozen=True)
class Curve:
    """One figure of a run at each record that has it; all arrays have the same length."""

    step: Array
    tokens: Array
    """NaN where a record does not say."""
    elapsed_s: Array
    """NaN where a record does not say."""
    value: Array


@dataclass(frozen=True)
class RunData:
    """What the directory of one run says at one moment."""

    path: Path
    name: str
    """The name of the directory; with its parents where another run has the same."""
    state: str
    """As `flatout runs` shows it, or WATCHED."""
    settings: Mapping[str, Any]
    """config.yaml under dotted keys; empty when it cannot be read."""
    curves: Mapping[str, Curve]
    """By the name in metrics.jsonl, such as train/loss."""
    num_records: int
    events: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    """summary.json; empty while the run has not finished."""
    findings: Any
    """findings.json as it is; None when there is none."""
    notes: tuple[str, ...]
    """What is missing or damaged, as sentences."""

    @property
    def longest(self) -> Curve | None:
        """The curve with the most records, which say where a step stands."""
        return max(self.curves.values(), key=lambda curve: len(curve.step), default=None)


@dataclass
class _Columns:
    """Numbers of metrics.jsonl in columns, which take a tenth of the memory of the records."""

    step: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[float] = field(default_factory=lambda: array("d"))
    elapsed_s: array[float] = field(default_factory=lambda: array("d"))
    figures: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    """By name: the numbers of the records, and the values."""
    without_step: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        step = _number(record.get("step"))
        if not math.isfinite(step):
            self.without_step += 1
            return
        row = len(self.step)
        self.step.append(step)
        self.tokens.append(_number(record.get("tokens")))
        self.elapsed_s.append(_number(record.get("elapsed_s", record.get("wall_s"))))
        for name, value in record.items():
            if "/" not in name or type(value) not in NUMBERS:
                continue
            known = self.figures.get(name)
            if known is None:
                known = self.figures[name] = (array("q"), array("d"))
            known[0].append(row)
            known[1].append(value if type(value) is float else _number(value))

    def curves(self) -> dict[str, Curve]:
        positions = [np.array(getattr(self, name)) for name in POSITIONS]
        found = {}
        for name, (rows, values) in self.figures.items():
            at = np.array(rows, dtype=np.int64)
            value = np.array(values)
            value[~np.isfinite(value)] = math.nan
            step, tokens, elapsed_s = (position[at] for position in positions)
            found[name] = Curve(step, tokens, elapsed_s, value)
        return found


class RunReader:
    """Reads one run directory, again and again while it grows."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._metrics = LineReader(path / layout.METRICS)
        self._event_lines = LineReader(path / layout.EVENTS)
        self._columns = _Columns()
        self._events: list[Mapping[str, Any]] = []
        self._events_left_out = 0

    def read(self) -> RunData:
        """Return what the directory says now."""
        notes: list[str] = []
        state = self._state(notes)
        self._read_lines(notes)
        curves = self._columns.curves()
        notes += self._notes_on_records(is_running=state == "running")
        settings = (
            {}
            if state == WATCHED
            else _or_note(lambda: flat(read_document(self._path / layout.CONFIG)), {}, notes)
        )
        summary = _or_note(lambda: layout.read_summary(self._path), None, notes)
        return RunData(
            path=self._path,
            name=self._name,
            state=state,
            settings=settings,
            curves=curves,
            num_records=len(self._columns.step),
            events=tuple(self._events),
            summary=summary or {},
            findings=_or_note(lambda: _json_or_none(self._path / FINDINGS), None, notes),
            notes=tuple(dict.fromkeys(notes)),
        )

    def signature(self) -> tuple[object, ...]:
        """Return a value that changes when a file of the directory or the run's state does."""
        names = (layout.METRICS, layout.EVENTS, layout.SUMMARY, layout.EXIT_CODE, FINDINGS)
        return (self._state([]), *(_stamp(self._path / name) for name in names))

    def _state(self, notes: list[str]) -> str:
        if not (self._path / layout.CONFIG).exists():
            return WATCHED
        return str(_or_note(lambda: run_state(self._path), "damaged", notes))

    def _read_lines(self, notes: list[str]) -> None:
        if self._metrics.was_replaced():  # a resume drops the records of an abandoned branch
            self._metrics.restart()
            self._columns = _Columns()
        if self._event_lines.was_replaced():
            self._event_lines.restart()
            self._events, self._events_left_out = [], 0
        try:
            for record in self._metrics.read():
                self._columns.add(record)
            for event in self._event_lines.read():
                if len(self._events) < MAX_EVENTS:
                    self._events.append(event)
                else:
                    self._events_left_out += 1
        except FlatoutError as error:
            notes.append(error.what)

    def _notes_on_records(self, *, is_running: bool) -> list[str]:
        columns, notes = self._columns, []
        for lines in (self._metrics, self._event_lines):
            notes += lines.notes(is_growing=is_running)
        if columns.without_step:
            records = _count(columns.without_step, "record")
            notes.append(f"{records} of metrics.jsonl without a step left out of the report.")
        for figure, (_, values) in columns.figures.items():
            if gaps := int(np.count_nonzero(~np.isfinite(values))):
                records = _count(gaps, "record")
                notes.append(f"{figure} is not a finite number in {records}: gaps in its curve.")
        if not len(columns.step):
            notes.append("metrics.jsonl has no records yet, so there are no curves.")
        if self._events_left_out:
            notes.append(
                f"events.jsonl has more than {MAX_EVENTS:,} events; the report has the first ones."
            )
        return notes


def names_of(paths: list[Path]) -> list[str]:
    """Return a short name for each run directory, different for each of them."""
    parts = [path.absolute().parts for path in paths]
    longest = max(map(len, parts), default=0)
    for length in range(1, longest + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _number(value: object) -> float:
    """Return a number as a float; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _or_note(read: Callable[[], Any], default: Any, notes: list[str]) -> Any:
    """Return what `read` returns; after an error of ours `default`, and the error as a note."""
    try:
        return read()
    except FlatoutError as error:
        notes.append(error.what)
        return default


def _json_or_none(path: Path) -> Any:
    return read_json(path) if path.exists() else None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
