"""Runs several transfers at once; the first failure stops the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event, Lock

from flatout.progress import Progress

MAX_PARALLEL = 8
"""Files transferred at the same time: a transfer mostly waits for a server."""

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

        with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="flatout-transfer") as pool:
            try:
                running = [pool.submit(run, job) for job in jobs]
                errors = [done.exception() for done in as_completed(running)]
            except BaseException:
                stopped.set()
                raise
    for error in errors:
        if error is not None and not isinstance(error, CancelledError):
            raise error
