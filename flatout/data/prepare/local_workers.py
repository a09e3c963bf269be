"""Packing ranges in several processes, which write them themselves and send back what they
recorded.

Each worker is a fresh interpreter on a socket of its own: it inherits no thread, lock or CUDA
context, does not import the caller's script again, and ends when the socket closes, however the
caller ends. Terminal interrupts go to the caller alone.
"""

from __future__ import annotations

import gc
import itertools
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from flatout.data.prepare.ranges import Range, RangeRecord, pack_range
from flatout.data.prepare.tokenize import Packing, Tally, Tell
from flatout.data.tokenizers.check import PIECE_CPU_S, bound_pieces
from flatout.errors import FlatoutError, RunFailed

T = TypeVar("T")

QUEUED = 3
"""Ranges a worker holds: the one being synced, the one it packs, and the next."""

_BOOT = "import sys; sys.path[:] = {path!r}; from flatout.data.prepare.local_workers import serve; serve({descriptor})"


@dataclass(frozen=True)
class Setup:
    """What a worker is told once."""

    packing: Packing
    folder: Path
    """Where ranges are written."""


@dataclass(frozen=True)
class Failure:
    """An error in a worker, as plain text: not every exception can travel."""

    what: str
    fix: str = ""
    kind: type[FlatoutError] | None = None
    trace: str = ""

    def error(self) -> Exception:
        """Return the exception to raise in the caller."""
        kind = self.kind or RunFailed
        what, fix = self.what, self.fix
        if self.kind is None:
            what = f"A worker of prepare failed: {what}."
            fix = "The traceback above names the line; --workers 1 shows it in one process."
        error = kind(what, fix=fix)
        if self.trace:
            error.add_note(self.trace)
        return error


class Workers(Protocol):
    """What packs ranges, wherever it has them packed."""

    def pack(
        self, ranges: Sequence[Range], setup: Setup, tell: Tell = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the ranges and yield their records in order.

        Raises: DataError for the first bad row in the order of the ranges.
        """
        ...


Answer = tuple[int, RangeRecord | Failure]
"""Which of the ranges ended, counted from the first, and how."""


def in_order(
    ranges: Sequence[Range],
    give: Callable[[Sequence[Range], int], int],
    answers: Callable[[], Iterable[Answer]],
) -> Iterator[RangeRecord]:
    """Yield the records of ranges in order, however they end.

    `give(ranges, given)` gives out ranges from number `given` on while there is room, and returns
    the next; `answers()` waits for some that ended. Nothing is given out after a range that failed.

    Raises: the error of the first range that failed.
    """
    done: dict[int, RangeRecord | Failure] = {}
    given, until = 0, len(ranges)
    for wanted in range(len(ranges)):
        while wanted not in done:
            given = give(ranges[:until], given)
            for index, result in answers():
                done[index] = result
                if isinstance(result, Failure):
                    until = min(until, index + 1)
        result = done.pop(wanted)
        if isinstance(result, Failure):
            raise result.error()
        yield result


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    held: list[int] = field(default_factory=list)


class Crew:
    """Some worker processes, which start at once and are ready when there is something to pack; one
    is this process.
    """

    def __init__(self, count: int) -> None:
        self._workers: list[_Worker] = []
        try:
            while count > 1 and len(self._workers) < count:
                self._workers.append(_start())
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
        self._workers = []

    def pack(
        self, ranges: Sequence[Range], setup: Setup, tell: Tell = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the ranges and yield their records in order, whatever the number of workers.

        Raises: DataError for the first bad row in the order of the ranges; RunFailed when a worker
                dies.
        """
        if not self._workers:
            for work in ranges:
                yield pack_range(work, setup.packing, setup.folder, tell)()
            return
        for worker in self._workers:
            _send(worker, setup)
        yield from in_order(ranges, self._give, lambda: self._answers(tell))

    def _give(self, ranges: Sequence[Range], given: int) -> int:
        """Give out ranges from number `given` on while a worker has room, and return the next."""
        while given < len(ranges):
            worker = min(self._workers, key=lambda worker: len(worker.held))
            if len(worker.held) >= QUEUED:
                break
            worker.held.append(given)
            _send(worker, (given, ranges[given]))
            given += 1
        return given

    def _answers(self, tell: Tell) -> list[Answer]:
        """Wait for answers, and return those that end a range."""
        by_connection = {worker.connection: worker for worker in self._workers}
        ended = []
        for ready in wait(list(by_connection)):
            worker = by_connection[ready]  # type: ignore[index]  # only these were waited for
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise _died(worker) from error
            if isinstance(answer, Tally):
                tell(answer)
            else:
                worker.held.remove(answer[0])
                ended.append(answer)
        return ended


def _start() -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        boot = _BOOT.format(path=sys.path, descriptor=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    return _Worker(process, Connection(ours.detach()))


def _send(worker: _Worker, message: object) -> None:
    try:
        worker.connection.send(message)
    except OSError as error:
        raise _died(worker) from error


def _died(worker: _Worker) -> RunFailed:
    code = worker.process.wait()
    if code == -signal.SIGXCPU:
        return RunFailed(
            f"The tokenizer took more than {PIECE_CPU_S} s of CPU time for one piece of text.",
            fix="Use another tokenizer: this one has a pattern without end.",
        )
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return RunFailed(
        f"A worker of prepare {how}.",
        fix="Run the same command again: it keeps what is done. Signal 9 is mostly a lack of memory: use fewer --workers.",
    )


def serve(descriptor: int) -> None:
    """Be a worker: pack ranges from the socket until it closes. Syncing and recording one overlaps
    with packing the next.
    """
    connection = Connection(descriptor)
    sending = threading.Lock()

    def answer(message: object) -> None:
        with sending:
            connection.send(message)

    with ThreadPoolExecutor(1) as recorder:
        try:
            setup: Setup = connection.recv()
            bound_pieces(setup.packing.tokenizer)
            for number in itertools.count():
                index, work = connection.recv()
                record = attempt(partial(pack_range, work, setup.packing, setup.folder, answer))
                if number == 0:
                    gc.freeze()  # a vocabulary is 100,000 objects, which the collector would go through again and again
                if isinstance(record, Failure):
                    answer((index, record))
                else:
                    recorder.submit(
                        lambda index=index, record=record: answer((index, attempt(record)))  # type: ignore[misc]
                    )
        except (EOFError, ConnectionError):
            return


def attempt(call: Callable[[], T]) -> T | Failure:
    """Return what a call returns, or how it failed."""
    try:
        return call()
    except FlatoutError as error:
        return Failure(error.what, error.fix, type(error))
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", trace=traceback.format_exc())
