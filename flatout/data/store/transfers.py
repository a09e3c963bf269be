"""Files between here and a store, several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event, Lock

from flatout.progress import Task

AT_ONCE = 8
"""Files under way at the same time; what takes long is waiting for a server."""


class Transfers:
    """Jobs that each move one file; the first that fails ends the others at their next block."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = Lock()
        self._ended = Event()

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Do all jobs.

        Raises: what the first one raised that failed.
        """
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="flatout-transfer") as pool:
            try:
                errors = [
                    done.exception()
                    for done in as_completed([pool.submit(self._do, job) for job in jobs])
                ]
            except BaseException:
                self._ended.set()
                raise
        for error in errors:
            if error is not None and not isinstance(error, CancelledError):
                raise error

    def _do(self, job: Callable[[], object]) -> None:
        if self._ended.is_set():
            raise CancelledError
        try:
            job()
        except BaseException:
            self._ended.set()
            raise

    def advance(self, num_bytes: int) -> None:
        """Count bytes as moved; jobs call this.

        Raises: CancelledError when another job has failed.
        """
        if self._ended.is_set():
            raise CancelledError
        with self._lock:
            self._task.advance(num_bytes / 1e6)
