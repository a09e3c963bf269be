"""Runs several transfers at once. The first failure stops the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from threading import Event, Lock, Thread

from flatout.progress import Progress

MAX_PARALLEL = 8
"""Files transferred at the same time: a transfer mostly waits for a server."""
INTERRUPTED_WAIT_S = 2.0
"""How long an interrupted caller waits for the threads. Each stops at its next block."""

Advance = Callable[[int], None]
"""Reports bytes as transferred. Raises CancelledError when another transfer has failed."""


def transfer_all(
    title: str, jobs: Iterable[Callable[[Advance], object]], num_bytes: int, progress: Progress
) -> None:
    """Run jobs that each move one file, and show the progress of all their bytes.

    A job calls its argument with the bytes of each block: the first failure stops the other jobs at
    their next block.

    Raises: the error of the first job that failed.
    """
    waiting, errors = deque(jobs), list[BaseException]()
    lock, stopped = Lock(), Event()
    with progress.task(title, total=num_bytes / 1e6, unit="MB") as task:

        def advance(moved: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with lock:
                task.advance(moved / 1e6)

        def serve() -> None:
            with suppress(IndexError):
                while not stopped.is_set():
                    job = waiting.popleft()
                    try:
                        job(advance)
                    except BaseException as error:  # raised in the caller
                        errors.append(error)
                        stopped.set()

        # daemon threads: the end of the process does not wait for a silent server
        threads = [
            Thread(target=serve, name=f"flatout-transfer-{number}", daemon=True)
            for number in range(min(MAX_PARALLEL, len(waiting)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            stopped.set()
            until_s = time.monotonic() + INTERRUPTED_WAIT_S
            for thread in filter(Thread.is_alive, threads):
                thread.join(max(until_s - time.monotonic(), 0.0))
            raise
    for error in errors:
        if not isinstance(error, CancelledError):
            raise error
