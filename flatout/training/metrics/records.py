"""Appends to the journal and to the table of a run: events.jsonl and metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flatout.storage.files import open_own
from flatout.storage.json_io import finite_numbers, object_or_none
from flatout.training.checkpoint.catalog import CheckpointInfo
from flatout.training.run_dir.layout import METRICS

MOST_UNWRITTEN = 2**24
"""Bytes of lines that wait for a disk that fails. Later ones are lost."""


class Lines:
    """Appends JSON lines to a file of a run directory. No error of the disk stops the run.

    What the disk fails to write comes before the next line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refusal: OSError | None = None
        """The error of the last attempt to write. None when it succeeded."""
        self.lacks_lines = False
        """Whether lines were lost, or were still waiting when the file was closed."""
        self.num_bytes = path.stat().st_size if path.exists() else 0
        """The size of the file once every line is written."""
        self._unwritten = b""
        self._descriptor: int | None = None

    def append(self, line: Mapping[str, object]) -> None:
        """Append one line, or keep it until the disk accepts it.

        Raises: CheckpointError when the file is a link.
        """
        encoded = json.dumps(line).encode() + b"\n"
        if len(self._unwritten) < MOST_UNWRITTEN:
            self._unwritten += encoded
            self.num_bytes += len(encoded)
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
        """Open the file. End a line that a kill left unfinished."""
        descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            self._unwritten = b"\n" + self._unwritten
            self.num_bytes += 1
        return descriptor


def truncate_metrics(
    run_folder: Path, saved: CheckpointInfo | None, *, is_at_end: bool
) -> str | None:
    """Remove the records after a checkpoint from metrics.jsonl, all of them for None.

    Evaluations of its own step stay, which are after `metrics_bytes`. A run that is at its end
    evaluates again, and they go.
    Returns: what is missing from the file, as `missing_metrics`.
    """
    path, length = run_folder / METRICS, saved.metrics_bytes if saved else 0
    lost = missing_metrics(run_folder, saved) if saved else None
    if lost or length is None or not path.exists():
        return lost
    last = saved.step if saved and not is_at_end else -1
    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as file:
        file.seek(length)
        for line in file:
            step = finite_numbers(object_or_none(line) or {}).get("step", math.inf)
            if step > last:
                break
            length += len(line)
        file.truncate(length)
    return None


def missing_metrics(run_folder: Path, saved: CheckpointInfo) -> str | None:
    """Return what metrics.jsonl lacks since a checkpoint was saved, as a sentence, or None."""
    path, length = run_folder / METRICS, saved.metrics_bytes or 0
    lost = length - (path.stat().st_size if path.exists() else 0)
    if lost <= 0:
        return None
    return (
        f"{path} has lost {lost:,} of {length:,} bytes since the checkpoint of step {saved.step} "
        "was saved. Training continues. Curves and reports have gaps before that step, unless you "
        "restore the file from a copy."
    )
