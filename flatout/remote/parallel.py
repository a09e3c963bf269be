"""Runs several transfers at once; the first failure stops the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, as_completed, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from flatout.progress import Progress

MAX_PARALLEL = 8
"""Files transferred at the same time: a transfer mostly waits for a server."""
INTERRUPTED_WAIT_S = 2.0
"""How long an interrupted caller waits for the threads; each stops at its next block."""

Advance = Callable[[int], None]
"""Reports bytes as transferred; raises CancelledError when another transfer has failed."""


def transfer_all(
    title: str, jobs: Iterable[Callable[[Advance], object]], num_bytes: int, progress: Progress
) -> None:
    """Run jobs that each move one file, and show the progress of all their bytes.

    A job calls its argument with the bytes of each block: the first failure stops the other jobs at
    their next block.

    Raises: the error of the first job that failed.
    """
    lock, stopped = Lock(), Event()
    with progress.task(title, total=num_bytes / 1e6, unit="MB") as task:

        def advance(moved: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with lock:
                task.advance(moved / 1e6)

        def run(job: Callable[[Advance], object]) -> None:
            if stopped.is_set():
                raise CancelledError
            try:
                job(advance)
            except BaseException:
                stopped.set()
                raise

        running = _started(run, jobs)
        try:
            errors = [done.exception() for done in as_completed(running)]
        except BaseException:
            stopped.set()
            wait(running, timeout=INTERRUPTED_WAIT_S)
            raise
    for error in errors:
        if error is not None and not isinstance(error, CancelledError):
            raise error


def _started(
    run: Callable[[Callable[[Advance], object]], object],
    jobs: Iterable[Callable[[Advance], object]],
) -> list[Future[None]]:
    """Run the jobs in daemon threads: the end of the process does not wait for a silent server."""
    waiting = [(job, Future[None]()) for job in jobs]
    queue = SimpleQueue[tuple[Callable[[Advance], object], Future[None]]]()
    for item in waiting:
        queue.put(item)

    def serve() -> None:
        with suppress(Empty):
            while True:
                job, done = queue.get_nowait()
                try:
                    run(job)
                    done.set_result(None)
                except BaseException as error:  # raised in the caller
                    done.set_exception(error)

    for number in range(min(MAX_PARALLEL, len(waiting))):
        Thread(target=serve, name=f"flatout-transfer-{number}", daemon=True).start()
    return [done for _, done in waiting]
