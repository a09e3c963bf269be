"""A run's records and events: the lines of metrics.jsonl and events.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flatout.files import open_own, write_text
from flatout.json_io import JsonObject
from flatout.training.run_dir.layout import METRICS

MOST_UNWRITTEN = 2**24
"""Bytes of lines that wait for a disk that refuses them; later ones are lost."""


class Lines:
    """Appends JSON lines to a file of a run directory; no error of the disk stops the run.

    What the disk refuses is written before the next line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refusal: OSError | None = None
        """The error of the last attempt to write; None when it succeeded."""
        self.lacks_lines = False
        """Whether lines were lost, or were still waiting when the file was closed."""
        self._unwritten = b""
        self._descriptor: int | None = None

    def append(self, line: Mapping[str, object]) -> None:
        """Append one line, or keep it until the disk accepts it.

        Raises: CheckpointError when the file is a link.
        """
        if len(self._unwritten) < MOST_UNWRITTEN:
            self._unwritten += json.dumps(line).encode() + b"\n"
        else:
            self.lacks_lines = True
        self.flush()

    def flush(self) -> None:
        """Open the file, write the lines that wait, as far as the disk accepts them."""
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
            self.refusal = None
        except OSError as error:
            self.refusal = error

    def close(self) -> None:
        """Write what waits, if the disk accepts it, and sync and close the file."""
        if self._unwritten:
            self.flush()
        if self._descriptor is not None:
            with suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self.lacks_lines |= bool(self._unwritten)

    def _open(self) -> int:
        """Open the file; end a line that a kill left unfinished."""
        descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            self._unwritten = b"\n" + self._unwritten
        return descriptor


class Records:
    """Writes the records of a run that starts at or resumes from `step`, on its main rank."""

    def __init__(self, run_folder: Path, step: int) -> None:
        path = run_folder / METRICS
        self.train_loss = _drop_later_steps(path, step) if path.exists() else None
        """The training loss of the last record before this process; None if there is none."""
        self.lines = Lines(path)
        self.lines.flush()

    def write(self, record: Mapping[str, float]) -> JsonObject:
        """Write a record without its non-finite figures, which JSON cannot represent; return it."""
        record = {name: value for name, value in record.items() if math.isfinite(value)}
        self.lines.append(record)
        return record


def _drop_later_steps(path: Path, step: int) -> float | None:
    """Remove the lines after `step` from metrics.jsonl; return the last remaining training loss.

    Damaged lines are removed too.
    """
    with os.fdopen(open_own(path, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
        kept = [line for line in file.read().splitlines() if _step_of(line) <= step]
    write_text(path, "".join(line + "\n" for line in kept))
    losses = (json.loads(line).get("train/loss") for line in reversed(kept))
    return next((loss for loss in losses if loss is not None), None)


def _step_of(line: str) -> float:
    """Return the step of a metrics line; infinity for a damaged one, such as a crash leaves."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
