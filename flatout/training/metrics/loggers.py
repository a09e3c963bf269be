"""Loggers copy the metrics of a run to other places, such as W&B. A run survives their failures.

They are observers with a `close`. Each is called through a `Guard` in a thread, so that training
never waits for a network or a disk. The guard reports its first failure and then leaves it alone.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from flatout.assembly.preflight import check_loggers
from flatout.config.registry import LOGGERS, load_reference
from flatout.errors import ConfigError, on_one_line, without_secrets
from flatout.storage.json_io import JsonObject
from flatout.training.checkpoint.catalog import CHECKPOINTS
from flatout.training.metrics.observers import Observer, Quiet
from flatout.training.run_dir.layout import append_event
from flatout.training.run_dir.runlog import RunLog

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.config.sections import LogConfig

Outcome = Literal["finished", "stopped", "failed"]
"""How a run ended: a stopped one was saved, and the same command resumes it."""
Report = Callable[..., object]
"""`Log.event`: the kind of an event, and its fields."""
WAIT_S: Mapping[Outcome, float] = {"finished": 60.0, "stopped": 10.0, "failed": 10.0}
"""How long the end of a run waits for a logger. Whoever stops a run is in a hurry."""
OBSERVER_METHODS = ("on_start", "on_tick", "on_record", "on_event", "on_end")


class Logger(Quiet):
    """An observer that copies the metrics of a run to another place. Its `on_tick` is not called.

    A thread calls it, `on_start` first. After an exception in any method the logger is not called
    again, and the run continues.
    """

    def __init__(self) -> None:
        self.news: SimpleQueue[str] = SimpleQueue()
        """What `say` received. The run shows it."""

    def say(self, text: str) -> None:
        """Tell the user something, such as where the run is shown."""
        self.news.put(text)

    def close(self, outcome: Outcome) -> None:
        """Finish: the last call, also of a run that stops or fails."""


class Guard(Observer):
    """Calls one logger in a thread, and reports its messages and its failure."""

    def __init__(self, name: str, logger: Logger, report: Report) -> None:
        self._name = name
        self._logger = logger
        self._report = report
        self._outcome: Outcome = "failed"
        self._failures: SimpleQueue[Exception] = SimpleQueue()
        self._has_failed = False
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def on_start(self, run: Run) -> None:
        """Pass a copy of the run, whose step does not change while the thread reads it."""
        self._call("on_start", copy.copy(run))

    def on_tick(self, step: int, last_step: int) -> None:
        """Report the messages of the thread."""
        self._tell()

    def on_record(self, record: Mapping[str, float]) -> None:
        """Pass a record."""
        self._call("on_record", record)

    def on_event(self, event: JsonObject) -> None:
        """Pass an event, unless it is about this logger."""
        if event.get("logger") == self._name:
            return
        if event["event"] == "stop":
            self._outcome = "stopped"
        self._call("on_event", event)

    def on_end(self, summary: JsonObject) -> None:
        """Pass the summary."""
        self._outcome = "finished"
        self._call("on_end", summary)

    def close(self, *, wait: bool = True) -> None:
        """Close the logger, and `wait` for it, but not forever."""
        self._call("close", self._outcome)
        self._calls.put(None)
        if not wait:
            return
        self._thread.join(WAIT_S[self._outcome])
        if self._thread.is_alive():
            slow = TimeoutError(f"it did not finish within {WAIT_S[self._outcome]:.0f} s")
            self._failures.put(slow)
        self._tell()

    def _call(self, method: str, *values: Any) -> None:
        self._tell()
        if not self._has_failed:
            self._calls.put((method, values))

    def _work(self) -> None:
        """Make the calls until one fails."""
        try:
            while (call := self._calls.get()) is not None:
                method, values = call
                getattr(self._logger, method)(*values)
        except Exception as error:
            self._failures.put(error)

    def _tell(self) -> None:
        """Report news and the first failure, in the thread that trains."""
        while not self._logger.news.empty():
            text = on_one_line(without_secrets(self._logger.news.get()))
            self._report("logger", logger=self._name, text=text)
        if not self._failures.empty() and not self._has_failed:
            self._has_failed = True
            kind = "logger" if ":" in self._name else self._name
            reason = reason_of(self._failures.get())
            self._report(f"no_{kind}", logger=self._name, reason=reason)


def reason_of(error: Exception) -> str:
    """Return an exception as part of a sentence, without a full stop."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    first = next(iter(text.strip().splitlines()), "")
    return on_one_line(without_secrets(first)).rstrip(". ")[:300] or type(error).__name__


def guarded(names: Iterable[str], report: Report) -> tuple[Guard, ...]:
    """Return a guard for a new logger of each name."""
    return tuple(Guard(name, LOGGERS.get(name)(), report) for name in names)


def require_loggers(config: LogConfig) -> None:
    """Import the loggers and observers of a configuration, on every rank.

    Raises: ConfigError when one does not exist or is something else; MissingPackage.
    """
    check_loggers(config)
    for name in config.to:
        LOGGERS.get(name)
    for reference in config.observers:
        _observer_at(reference)


def configured_observers(config: LogConfig) -> list[Observer]:
    """Return the observers of `log.observers`. A class or function is called without arguments."""
    found = [(reference, _observer_at(reference)) for reference in config.observers]
    return [_checked(one() if callable(one) else one, reference) for reference, one in found]


def _observer_at(reference: str) -> Any:
    found = load_reference(reference)
    is_function = callable(found) and not isinstance(found, type)
    return found if is_function else _checked(found, reference)


def _checked(found: Any, reference: str) -> Any:
    lacking = [name for name in OBSERVER_METHODS if not hasattr(found, name)]
    if lacking:
        raise ConfigError(
            f"log.observers={reference} is not an observer: it has no {lacking[0]!r}.",
            fix="Derive it from flatout.Quiet. docs/extend.md shows an observer.",
        )
    return found


class RemoteRun:
    """The id of a run at a remote logger, an event `logger_id`, so that a resume continues it."""

    def __init__(self, run_folder: Path, logger: str) -> None:
        self._folder, self._logger = run_folder, logger

    def read(self) -> JsonObject:
        """Return what was stored. Nothing for a new run."""
        known = [event for event in RunLog(self._folder).events if event["event"] == "logger_id"]
        return next((one for one in reversed(known) if one.get("logger") == self._logger), {})

    def write(self, **fields: str | None) -> None:
        """Store the id, and whatever else identifies the run."""
        append_event(self._folder, "logger_id", logger=self._logger, **fields)


def links_of(run: Run) -> dict[str, str]:
    """Return where the run's files are. Loggers show these paths and upload no weights."""
    folder = run.folder.resolve()
    return {
        "host": socket.gethostname(),
        "run_directory": str(folder),
        "report": str(folder / "report.html"),
        "checkpoints": str((folder / CHECKPOINTS).resolve()),
    }
