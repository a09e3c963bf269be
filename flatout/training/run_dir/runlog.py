"""The reader of what a run recorded. Nothing in its files is trusted, and damage becomes a note.

events.jsonl is the journal. A run that resumes leaves its later steps behind: readers ignore what
the attempt before recorded after them. A directory without config.yaml is read too, if it has a
metrics.jsonl: other training loops write one.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from flatout.config.schema import flat
from flatout.errors import FlatoutError, RunFailed, Stopped
from flatout.progress import counted
from flatout.storage.json_io import JsonObject, LineReader, finite_numbers, is_finite
from flatout.training.checkpoint import catalog
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
