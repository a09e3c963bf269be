"""Runs several transfers at once; the first failure stops the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event, Lock

from flatout.progress import Task

MAX_PARALLEL = 8
"""Files transferred at the same time: a transfer mostly waits for a server."""


class Transfers:
    """Jobs that each move one file; the first failure stops the others at their next block."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = Lock()
        self._stopped = Event()

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run all jobs.

        Raises: the error of the first job that failed.
        """
        with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="flatout-transfer") as pool:
            try:
                errors = [
                    done.exception()
                    for done in as_completed([pool.submit(self._run_job, job) for job in jobs])
                ]
            except BaseException:
                self._stopped.set()
                raise
        for error in errors:
            if error is not None and not isinstance(error, CancelledError):
                raise error

    def _run_job(self, job: Callable[[], object]) -> None:
        if self._stopped.is_set():
            raise CancelledError
        try:
            job()
        except BaseException:
            self._stopped.set()
            raise

    def advance(self, num_bytes: int) -> None:
        """Report bytes as transferred; called by the jobs.

        Raises: CancelledError when another job has failed.
        """
        if self._stopped.is_set():
            raise CancelledError
        with self._lock:
            self._task.advance(num_bytes / 1e6)
