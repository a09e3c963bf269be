"""The figures of metrics.jsonl as a TensorBoard event file. A disk that refuses it does not end the
run, which has them elsewhere.
"""

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
    """An event file of a run that starts at, or resumes from, a step; TensorBoard leaves out what
    older files hold of later steps.

    `failed` is called, once, with what the disk says when it refuses: nothing more is written then.
    TensorBoard's own writer works in a thread, whose errors end in tracebacks.
    """

    def __init__(self, folder: Path, step: int, failed: Callable[[OSError], object]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._failed = failed
        self._file: IO[bytes] | None = None
        try:
            folder.mkdir(exist_ok=True)
            path = (
                folder
                / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            )
            self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
        except OSError as error:
            failed(error)
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
        try:
            RecordWriter(self._file).write(
                Event(wall_time=time.time(), **fields).SerializeToString()
            )
            self._file.flush()
        except OSError as error:
            self.close()
            self._file = None
            self._failed(error)
