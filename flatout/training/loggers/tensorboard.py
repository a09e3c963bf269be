"""TensorBoard: an event file in RUN/tensorboard."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import IO, TYPE_CHECKING, Any

from flatout.storage.files import open_own
from flatout.training.metrics.loggers import Logger, Outcome
from flatout.training.run_dir.layout import BOARD

if TYPE_CHECKING:
    from flatout.assembly.run import Run

_VERSION = "brain.Event:2"


class TensorBoard(Logger):
    """Writes the metrics of each record to a new event file.

    TensorBoard's own writers are not used: one runs in a thread and prints a traceback for each
    error, and importing the other loads every plugin, and boto3 if it is installed.
    """

    def on_start(self, run: Run) -> None:
        """Open the file. Where a run resumes, TensorBoard ignores later steps in older files."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        folder = run.folder / BOARD
        folder.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file: IO[bytes] = os.fdopen(open_own(folder / name, flags), "ab")
        self._add(file_version=_VERSION)
        if run.step:
            self._add(step=run.step + 1, session_log=SessionLog(status=SessionLog.START))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Write the metrics. TensorBoard shows the step and the time by itself."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        figures = {name: value for name, value in record.items() if "/" in name}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(step=int(record["step"]), summary=Summary(value=values))

    def close(self, outcome: Outcome = "finished") -> None:
        """Close the event file."""
        with suppress(OSError):
            self._file.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        try:
            self._file.write(length + _checksum(length) + event + _checksum(event))
            self._file.flush()
        except OSError:
            self.close()
            raise


def _checksum(data: bytes) -> bytes:
    """Return the checksum that a TFRecord has after its length and its data: CRC-32C, masked."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _crc_table()[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> list[int]:
    table = [*range(256)]
    for _ in range(8):
        table = [crc >> 1 ^ (crc & 1) * 0x82F63B78 for crc in table]
    return table


LOGGER = TensorBoard
