"""The journal and the table of a run, events.jsonl and metrics.jsonl: their reader and writer.

Nothing that is read is trusted, and damage becomes a note. A run that resumes leaves its later
steps behind: readers ignore what the attempt before recorded after them. A directory without
config.yaml is read too, if it has a metrics.jsonl: other training loops write one.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from flatout.config.schema import flat
from flatout.errors import FlatoutError, RunFailed, Stopped
from flatout.progress import counted
from flatout.storage.files import open_own
from flatout.storage.json_io import (
    JsonObject,
    LineReader,
    finite_numbers,
    is_finite,
    object_or_none,
)
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import CheckpointInfo
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import is_locked

Read = TypeVar("Read")
LAST_STEP = 2**53
"""Later steps are damage: arithmetic with them is not exact, or overflows."""
WATCHED = "watched"
"""The state of a directory without config.yaml, which another training loop wrote."""
STARTS = ("start", "resume")
"""Events with which a process of the run starts to train."""
DIVERGENCE = "divergence"
"""The event of values that are not finite, or differ between ranks, with which a process ends."""
AT_THE_END = ("early_stop", "end", "evaluation")
"""Events of a run's end, which one that resumes there records again."""
LEFT = (*AT_THE_END, "bad_step", "sample", "save", "skip")
"""Events that do not count when the run has resumed before their step."""
MOST_UNWRITTEN = 2**24
"""Bytes of lines that wait for a disk that fails. Later ones are lost."""
INTERRUPTED = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


class Origin(BaseModel, extra="ignore"):
    """The fields of the event `origin`: the checkpoint of another run, from which one starts."""

    asked: str
    """The argument of --resume, as an absolute path."""
    checkpoint: str
    """The checkpoint that it resolved to."""


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
        """The state as `flatout runs` shows it: running, finished, stopped, interrupted, failed,
        killed (it recorded no exit), new, damaged; or WATCHED.
        """
        if not (self.path / layout.CONFIG).exists():
            return WATCHED
        if self._is_running is None:
            return "damaged"
        if self._is_running:
            return "running"
        if self.summary is not None:
            return "finished"
        codes = [event.get("code") for event in self.attempt if event["event"] == "exit"]
        if not codes:
            return "killed" if self.events or catalog.has_saved(self.path) else "new"
        if codes[-1] in INTERRUPTED:
            return "interrupted"
        return "stopped" if codes[-1] == Stopped.exit_code else "failed"

    @cached_property
    def _is_running(self) -> bool | None:
        return self._or_note(lambda: is_locked(self.path), None)

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

    def latest(self, last_step: float) -> dict[str, float]:
        """Return the last value of each metric up to a step. A summary has the last results."""
        steps = (each for each in self.records() if each["step"] <= last_step)
        found = {name: value for each in steps for name, value in each.items()}
        names = {"step": "steps", "train/loss": "train_loss", "val/loss": "val_loss"}
        summary = self.summary or {}
        return found | finite_numbers({name: summary.get(key) for name, key in names.items()})

    @cached_property
    def _journal(self) -> list[JsonObject]:
        found = [one for one in self._read(layout.EVENTS) if isinstance(one.get("event"), str)]
        if not found and catalog.has_saved(self.path):
            self.notes.append(
                f"{self.path / layout.EVENTS} is missing: what the run recorded before, and "
                "whether it had finished, is not known."
            )
        return found

    @cached_property
    def events(self) -> list[JsonObject]:
        """The lines of events.jsonl that count. Each names its kind, and may lack other fields."""
        found: list[JsonObject] = []
        for line in self._journal:
            if line["event"] in STARTS and is_finite(line.get("step")):
                found = [event for event in found if not _is_left(event, line)]
            found.append(line)
        return found

    @property
    def attempt(self) -> list[JsonObject]:
        """The events since the last start: those of the last process that trained."""
        starts = [at for at, event in enumerate(self.events) if event["event"] in STARTS]
        return self.events[starts[-1] if starts else 0 :]

    @property
    def is_open(self) -> bool:
        """Whether a process has started to train and has recorded no exit."""
        kinds = [event["event"] for event in self.attempt]
        return bool(kinds) and kinds[0] in STARTS and "exit" not in kinds

    @cached_property
    def summary(self) -> JsonObject | None:
        """The summary of a finished run, else None.

        Its `run` is the directory, as it may have been moved, or restored on another machine.
        """
        ends = [event for event in self.attempt if event["event"] == "end"]
        if not ends:
            return None
        found = {k: v for k, v in ends[-1].items() if k not in ("event", "time", "step")}
        return {**found, "run": str(self.path)} if "run" in found else found

    @property
    def origin(self) -> Origin | None:
        """The checkpoint of another run from which this one started. None without one."""
        for event in reversed(self.events):
            if event["event"] == "origin":
                with suppress(ValidationError):
                    return Origin.model_validate(event)
        return None

    @property
    def rejected(self) -> set[int]:
        """The steps of checkpoints that lead to a bad step.

        When two processes in a row end in a divergence, and nothing was saved at that step or
        later, the second one's checkpoint is rejected, and those that it saved.
        """
        saved, rejected = set[int](), set[int]()
        bad = start = math.inf
        for event in self._journal:
            kind, step = event["event"], event.get("step")
            if not is_finite(step):
                continue
            if kind in STARTS:
                start = step if kind == "resume" else math.inf
            elif kind == "save":
                saved.add(int(step))
                rejected.discard(int(step))
                bad = math.inf if step >= bad else bad
            elif kind == DIVERGENCE:
                if bad < math.inf:
                    rejected |= {one for one in saved if one >= start}
                bad = step
        return rejected

    @cached_property
    def settings(self) -> JsonObject:
        """The resolved settings under dotted keys. Empty when they are missing or damaged."""
        if self.state == WATCHED:
            return {}
        return self._or_note(lambda: flat(layout.read_sections(self.path)[layout.RESOLVED]), {})

    def _read(self, name: str) -> Iterator[JsonObject]:
        reader = LineReader(self.path / name, tail_bytes=self._tail_bytes)
        try:
            yield from reader.read()
        except FlatoutError as error:
            self.notes.append(error.what)
            self.is_readable = False
        is_growing = reader.is_cut_off and bool(self._is_running)
        self.notes += reader.notes(is_growing=is_growing)

    def _or_note(self, read: Callable[[], Read], default: Read) -> Read:
        """Return what `read` returns. After an error of ours `default`, and the error as a note."""
        try:
            return read()
        except FlatoutError as error:
            self.notes += [] if error.what in self.notes else [error.what]
            return default


def _is_left(event: JsonObject, start: JsonObject) -> bool:
    """Return whether an event is of steps that a later start has left, or repeats."""
    step, first = event.get("step"), start["step"]
    if event["event"] not in LEFT or not is_finite(step):
        return False
    is_end = start.get("last_step") == first and event["event"] == "sample"
    return step > first or (step == first and (is_end or event["event"] in AT_THE_END))


def record_exit(folder: Path, code: int, error: BaseException | None = None) -> None:
    """Record the exit of this process and why it failed, ignoring errors of the disk.

    A command that was rejected before it trained changes nothing in the journal.
    """
    layout.write_exit_code(folder, code)
    with suppress(OSError):
        if code != RunFailed.exit_code and not RunLog(folder).is_open:
            return
    why: JsonObject = {}
    if error is not None:
        what, fix = (str(error).splitlines() or [""])[0][:300], None
        if isinstance(error, FlatoutError):
            what, fix = error.what, error.fix
        why = {"kind": type(error).__name__, "what": what, "fix": fix}
    with suppress(OSError, FlatoutError):
        layout.append_event(folder, "exit", code=code, **why)


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
    path, length = run_folder / layout.METRICS, saved.metrics_bytes if saved else 0
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
    path, length = run_folder / layout.METRICS, saved.metrics_bytes or 0
    lost = length - (path.stat().st_size if path.exists() else 0)
    if lost <= 0:
        return None
    return (
        f"{path} has lost {lost:,} of {length:,} bytes since the checkpoint of step {saved.step} "
        "was saved. Training continues. Curves and reports have gaps before that step, unless you "
        "restore the file from a copy."
    )
