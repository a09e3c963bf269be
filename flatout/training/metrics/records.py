"""A run's records and events: the lines of metrics.jsonl and events.jsonl."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path

from flatout.progress import counted
from flatout.storage.files import open_own, write_text
from flatout.storage.json_io import JsonObject, finite_numbers, object_or_none
from flatout.training.checkpoint.catalog import CheckpointInfo, read_info
from flatout.training.run_dir.layout import EVENTS, METRICS

REPEATED = ("early_stop", "evaluation", "sample", "end")
"""Events that a run logs again when it resumes before them."""
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
        self._unwritten = b""
        self._descriptor: int | None = None

    def append(self, line: Mapping[str, object]) -> bytes:
        """Append one line, or keep it until the disk accepts it, and return its bytes.

        Raises: CheckpointError when the file is a link.
        """
        encoded = json.dumps(line).encode() + b"\n"
        if len(self._unwritten) < MOST_UNWRITTEN:
            self._unwritten += encoded
        else:
            self.lacks_lines = True
        self.flush()
        return encoded

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
        return descriptor


class Records:
    """Writes the records of a run that starts at or resumes from `step`, on rank 0.

    `saved` is what the checkpoint that it resumes from records about metrics.jsonl.
    """

    def __init__(self, run_folder: Path, step: int, saved: CheckpointInfo | None = None) -> None:
        path = run_folder / METRICS
        kept = _keep(path, lambda line: finite_numbers(line).get("step", math.inf) <= step)
        losses = (json.loads(line).get("train/loss") for line in reversed(kept))
        self.train_loss: float | None = next((loss for loss in losses if loss is not None), None)
        """The training loss of the last record before this process. None if there is none."""
        self.count, self.crc32 = len(kept), _crc32(kept)
        """The number of records in the file, and the CRC-32 of their lines."""
        self.damage = _damage(path, kept, saved)
        """What is missing from the file, as a sentence. None when it is whole."""
        self.lines = Lines(path)
        self.lines.flush()
        last = json.loads(kept[-1]) if kept else {}
        self._evaluated = last["step"] if "val/loss" in last else None

    def write(self, record: Mapping[str, float]) -> tuple[JsonObject, bool]:
        """Write a record without its non-finite metrics, which JSON cannot represent.

        The evaluation at the step of the resume is not written a second time: a run that is killed
        after its last evaluation evaluates again.

        Returns: the record, and whether it was written.
        """
        record = {name: value for name, value in record.items() if math.isfinite(value)}
        if "val/loss" in record and record["step"] == self._evaluated:
            return record, False
        self.crc32 = zlib.crc32(self.lines.append(record), self.crc32)
        self.count += 1
        return record, True


def forget_events(run_folder: Path, step: int, *, at_end: bool) -> None:
    """Remove the events that a run which resumes at `step` logs again: those of later steps.

    `at_end` tells that it resumes at its end: then it also repeats those of `step`.
    """

    def stays(line: JsonObject) -> bool:
        logged = finite_numbers(line).get("step", -math.inf)
        is_repeated = logged > step or (at_end and logged == step)
        return not (is_repeated and line.get("event") in REPEATED)

    _keep(run_folder / EVENTS, stays)


def _keep(path: Path, stays: Callable[[JsonObject], bool]) -> list[str]:
    """Remove the damaged lines and those that do not stay from a file, and return the others."""
    if not path.exists():
        return []
    with os.fdopen(open_own(path, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    kept = [line for line in lines if (found := object_or_none(line)) is not None and stays(found)]
    if kept != lines:
        write_text(path, "".join(line + "\n" for line in kept))
    return kept


def _crc32(lines: Iterable[str]) -> int:
    return reduce(lambda crc, line: zlib.crc32(f"{line}\n".encode(), crc), lines, 0)


def damage_of(run_folder: Path, checkpoint: Path) -> str | None:
    """Return what metrics.jsonl has lost since a checkpoint was saved. None when it is whole.

    Damaged lines are removed from it.
    """
    path = run_folder / METRICS
    return _damage(path, _keep(path, lambda line: True), read_info(checkpoint))


def _damage(path: Path, kept: Sequence[str], saved: CheckpointInfo | None) -> str | None:
    """Return what is missing from metrics.jsonl, judged by the checkpoint of its last step."""
    if saved is None or saved.records is None:  # an earlier version wrote the checkpoint
        return None
    lost = saved.records - len(kept)
    if lost <= 0 and _crc32(kept[: saved.records]) == saved.records_crc32:
        return None
    what = f"has lost {counted(lost, 'record')}" if lost > 0 else "was changed or damaged"
    return (
        f"{path} {what} since the checkpoint of step {saved.step} was saved. Training continues. "
        "Curves and reports have gaps or wrong metrics before that step, unless you restore the "
        "file from a copy."
    )
