"""TensorBoard's copy of metrics.jsonl. A run continues if this file cannot be written."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from flatout.files import open_own

_VERSION = "brain.Event:2"


class Board:
    """A TensorBoard event file, for a run that starts at or resumes from `step`.

    TensorBoard then ignores later steps in older event files. If a write fails, `on_failure` is
    called once with the error and nothing more is written. TensorBoard's own writer is not used: it
    runs in a thread and prints a traceback for each error.
    """

    def __init__(self, folder: Path, step: int, on_failure: Callable[[OSError], object]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._on_failure = on_failure
        self._file: IO[bytes] | None = None
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.fdopen(open_own(folder / name, flags), "ab")
        except OSError as error:
            on_failure(error)
        self._add(file_version=_VERSION)
        if step:
            self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        if self._file:
            with suppress(OSError):
                self._file.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            return
        event = Event(wall_time=time.time(), **fields).SerializeToString()
        try:
            RecordWriter(self._file).write(event)
            self._file.flush()
        except OSError as error:
            self.close()
            self._file = None
            self._on_failure(error)
