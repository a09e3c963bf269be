"""What all workers share, and worker processes on this machine.

Workers write ranges and return their records. On this machine, a fresh interpreter loads what they
need and forks them, each connected by a socket: they inherit no threads, locks or CUDA context, do
not import the caller's script again, and end when the socket closes, however the caller ends. They
ignore signals that ask them to stop, which schedulers send to all processes of a job: the caller
answers them.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Protocol, Self, TypeVar

from flatout.data.prepare.pack.range_files import RangeRecord
from flatout.data.prepare.pack.tokenize import Packing, Report, Tally, pack_range
from flatout.data.prepare.pack.work_items import WorkItem
from flatout.data.tokenizers import Tokenizer
from flatout.errors import FlatoutError, RunFailed

T = TypeVar("T")

RESUMES = "Run the same command again: it continues where it stopped."


class WorkerFailed(RunFailed):
    """An unexpected error in a worker. Its traceback is a note."""


class Workers(Protocol):
    """Packs ranges, on this machine or elsewhere."""

    def load(self, tokenizer: Tokenizer) -> None:
        """Let workers load the tokenizer that `pack` is likely to name."""

    def pack(
        self, items: Sequence[WorkItem], packing: Packing, report: Report = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the items and yield the records of their ranges in order.

        Raises: DataError for the first bad row in the order of the items.
        """
        ...


Answer = tuple[int, RangeRecord | FlatoutError]
"""The number of a finished range, and its result."""


def in_order(
    items: Sequence[WorkItem],
    submit: Callable[[deque[WorkItem]], object],
    collect: Callable[[], Iterable[Answer]],
) -> Iterator[RangeRecord]:
    """Yield the records of items in order, whatever order they finish in.

    `submit(waiting)` takes items from the left while workers have room. `collect()` waits for some
    to finish. Nothing is submitted after an item that failed.

    Raises: the error of the first item that failed.
    """
    waiting = deque(items)
    done: dict[int, RangeRecord | FlatoutError] = {}
    for item in items:
        while item.number not in done:
            submit(waiting)
            for number, result in collect():
                done[number] = result
                if isinstance(result, FlatoutError):
                    waiting.clear()
        result = done.pop(item.number)
        if isinstance(result, FlatoutError):
            raise result
        yield result


def attempt(
    call: Callable[[], T],
    failed: str = "A worker of prepare failed",
    fix: str = "The traceback above names the line. --workers 1 shows it in one process.",
) -> T | FlatoutError:
    """Return the result of a call, or its error. An unexpected error starts with `failed`."""
    try:
        return call()
    except FlatoutError as error:
        return error
    except Exception as error:
        unexpected = WorkerFailed(f"{failed}: {type(error).__name__}: {error}.", fix=fix)
        unexpected.add_note(traceback.format_exc())
        return unexpected


QUEUED = 3
"""Ranges per worker: the one being synced, the one being packed, and the next."""

_BOOT = (
    "import gc, os, signal; gc.disable(); [signal.signal(n, signal.SIG_IGN) for n in {signals}]; "
    "os.environ['OPENBLAS_NUM_THREADS'] = '1'; "  # its threads spin, and nothing uses them
    "import sys; sys.path[:] = {path!r}; from flatout.data.prepare.workers.local import serve; "
    "serve({descriptors})"
)


_WAIT = """\
import os, sys
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range({count})]
code = next((code for code in codes if code != -9), -9)
code < 0 and os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""Waits for all workers, and ends as the first that was not killed with the others."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    """The parent of all workers, which are the process group of its number. It ends after them."""
    connection: Connection
    held: int = 0
    """Number of items that were sent to it and have not finished."""

    @classmethod
    def start(cls, count: int) -> list[Self]:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [pair[1].fileno() for pair in pairs]
        signals = [int(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        boot = _BOOT.format(path=sys.path, descriptors=theirs, signals=signals)
        process = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.DEVNULL,
            pass_fds=theirs,
            process_group=0,
        )
        for _, their in pairs:
            their.close()
        return [cls(process, Connection(ours.detach())) for ours, _ in pairs]

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self.death() from error

    def kill(self) -> None:
        """Kill all workers, unless their parent has been waited for: it ends after them."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def death(self) -> RunFailed:
        """Wait for the processes to end, and return the error that explains why one did."""
        self.kill()
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RunFailed(
            f"A worker of prepare {how}.",
            fix=f"{RESUMES} The usual cause of signal 9 is too little memory: use fewer --workers.",
        )


class LocalWorkers:
    """`count` worker processes, started at once. A count of 1 packs in this process."""

    def __init__(self, count: int) -> None:
        self._workers = _Worker.start(count) if count > 1 else []
        self._loading: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def load(self, tokenizer: Tokenizer) -> None:
        """Send the tokenizer to the parent of the workers, which loads it before it forks them."""
        if self._workers and self._loading is None:

            def send() -> None:
                with suppress(RunFailed):  # `pack` fails, too
                    self._workers[0].send(tokenizer)

            self._loading = threading.Thread(target=send)  # it waits until that process reads
            self._loading.start()

    def stop(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()
        if self._loading is not None:
            self._loading.join()  # nobody reads what it sends any more
        for worker in self._workers:
            worker.connection.close()
            worker.process.wait()
        self._workers = []

    def pack(
        self, items: Sequence[WorkItem], packing: Packing, report: Report = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the items and yield the records of their ranges in order.

        Raises: DataError for the first bad row in the order of the items; RunFailed when a worker
                dies.
        """
        if not self._workers:
            for item in items:
                yield pack_range(item, packing, report)()
            return
        self.load(packing.tokenizer)
        self._loading.join()  # type: ignore[union-attr]  # there is one now
        for worker in self._workers:
            worker.send(packing)
        yield from in_order(items, self._submit, lambda: self._collect(report))

    def _submit(self, waiting: deque[WorkItem]) -> None:
        """Send items while a worker has room."""
        while waiting:
            worker = min(self._workers, key=lambda worker: worker.held)
            if worker.held >= QUEUED:
                break
            worker.held += 1
            worker.send(waiting.popleft())

    def _collect(self, report: Report) -> list[Answer]:
        """Wait for messages, and return the results of finished ranges."""
        by_connection = {worker.connection: worker for worker in self._workers}
        ended = []
        for ready in wait(list(by_connection)):
            worker = by_connection[ready]  # type: ignore[index]  # only these were waited for
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise worker.death() from error
            if isinstance(answer, Tally):
                report(answer)
            else:
                worker.held -= 1
                ended.append(answer)
        return ended


def serve(descriptors: Sequence[int]) -> None:
    """Load a tokenizer, fork a worker per socket, leave their process group, and wait for them.

    A small process waits, so that the memory of this one is free.
    """
    with suppress(EOFError, OSError), Connection(os.dup(descriptors[0])) as first:
        tokenizer: Tokenizer = first.recv()
        if tokenizer.engine == "gigatoken":  # which starts no threads, which a fork would lose
            attempt(partial(tokenizer.encode_piece, "", 0))
    gc.freeze()
    for descriptor in descriptors:
        if os.fork() == 0:
            for other in {*descriptors} - {descriptor}:
                os.close(other)
            _work(descriptor)
            return
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(OSError):  # the caller has ended, and so do the workers
        os.setpgid(0, os.getpgid(os.getppid()))
    wait_for = _WAIT.format(count=len(descriptors))
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", wait_for])


def _work(descriptor: int) -> None:
    """Pack the ranges that the socket sends, until it closes.

    A range is recorded while the next one is packed.
    """
    connection = Connection(descriptor)
    sending = threading.Lock()

    def answer(message: object) -> None:
        with sending:
            connection.send(message)

    with ThreadPoolExecutor(1) as recorder:
        try:
            packing: Packing = connection.recv()
            for number in itertools.count():
                item: WorkItem = connection.recv()
                record = attempt(partial(pack_range, item, packing, answer))
                if number == 0:
                    gc.freeze()  # spares the collector the 100,000 objects of a vocabulary
                    gc.enable()
                if isinstance(record, FlatoutError):
                    answer((item.number, record))
                else:
                    recorder.submit(
                        lambda index=item.number, record=record: answer((index, attempt(record)))  # type: ignore[misc]
                    )
        except (EOFError, ConnectionError):
            return
