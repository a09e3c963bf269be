"""Packing in several processes, results in the order of the jobs.

Each worker is a fresh interpreter on a socket of its own: it inherits no thread, lock or CUDA context, does not import the
caller's script again, and ends when the socket closes, however the caller ends. Terminal interrupts go to the caller alone.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from flatout.data.pack import Assignment, Job, OnBadRow, Packed, pack
from flatout.data.tokenizer import Tokenizer
from flatout.errors import DataError, RunFailed

QUEUED = 2
"""Jobs a worker holds: the one it works on and the next."""
AHEAD = 3
"""Results that may wait for an earlier one, a worker: what bounds the memory."""

_BOOT = "import sys; sys.path[:] = {path!r}; from flatout.data.workers import serve; serve({descriptor})"


@dataclass(frozen=True)
class Setup:
    """What a worker is told once."""

    tokenizer: Tokenizer
    assignment: Assignment
    on_bad_row: OnBadRow


@dataclass(frozen=True)
class Failure:
    """An error in a worker, as plain text: not every exception can travel."""

    what: str
    fix: str | None
    trace: str = ""

    def error(self) -> Exception:
        """Return the exception to raise in the caller."""
        if self.fix is not None:
            return DataError(self.what, fix=self.fix)
        failed = RunFailed(
            f"A worker of prepare failed: {self.what}.", fix="The traceback above names the line; --workers 1 shows it in one process."
        )
        failed.add_note(self.trace)
        return failed


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    jobs: list[int]


def packed_in_order(jobs: Sequence[Job], setup: Setup, workers: int) -> Generator[Packed, None, None]:
    """Yield every job packed, in order, whatever the number of workers; one worker is this process.

    Raises: DataError for the first bad row in the order of the jobs; RunFailed when a worker dies.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield pack(job, setup.tokenizer, setup.assignment, setup.on_bad_row)
        return
    crew: list[_Worker] = []
    try:
        crew.extend(_start(setup) for _ in range(min(workers, len(jobs))))
        yield from _results(jobs, crew)
    finally:
        for worker in crew:
            worker.connection.close()
            worker.process.kill()
            worker.process.wait()


def _start(setup: Setup) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        boot = _BOOT.format(path=sys.path, descriptor=theirs.fileno())
        process = subprocess.Popen([sys.executable, "-c", boot], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0)
    worker = _Worker(process, Connection(ours.detach()), [])
    _send(worker, setup)
    return worker


def _results(jobs: Sequence[Job], crew: list[_Worker]) -> Generator[Packed, None, None]:
    done: dict[int, Packed | Failure] = {}
    given = wanted = 0
    while wanted < len(jobs):
        while given < len(jobs) and given < wanted + AHEAD * len(crew):
            worker = min(crew, key=lambda worker: len(worker.jobs))
            if len(worker.jobs) >= QUEUED:
                break
            worker.jobs.append(given)
            _send(worker, (given, jobs[given]))
            given += 1
        if wanted not in done:
            by_connection = {worker.connection: worker for worker in crew}
            for ready in wait(list(by_connection)):
                index, packed = _receive(by_connection[ready])  # type: ignore[index]  # only these were waited for
                done[index] = packed
        while wanted in done:
            packed = done.pop(wanted)
            if isinstance(packed, Failure):
                raise packed.error()
            yield packed
            wanted += 1


def _send(worker: _Worker, message: object) -> None:
    try:
        worker.connection.send(message)
    except OSError as error:
        raise _died(worker) from error


def _receive(worker: _Worker) -> tuple[int, Packed | Failure]:
    try:
        index, packed = worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _died(worker) from error
    worker.jobs.remove(index)
    return index, packed


def _died(worker: _Worker) -> RunFailed:
    code = worker.process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return RunFailed(
        f"A worker of prepare {how}.", fix="Signal 9 is mostly a lack of memory: use fewer --workers. Nothing was written; run it again."
    )


def serve(descriptor: int) -> None:
    """Be a worker: pack jobs from the socket until it closes."""
    connection = Connection(descriptor)
    try:
        setup: Setup = connection.recv()
        while True:
            index, job = connection.recv()
            connection.send((index, _packed(job, setup)))
    except (EOFError, ConnectionError):
        return


def _packed(job: Job, setup: Setup) -> Packed | Failure:
    try:
        return pack(job, setup.tokenizer, setup.assignment, setup.on_bad_row)
    except DataError as error:
        return Failure(error.what, error.fix)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", None, traceback.format_exc())
