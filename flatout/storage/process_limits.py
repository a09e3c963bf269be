"""Resource limits of the operating system."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import psutil

MOST_FILES = 65_536

_process = lru_cache(psutil.Process)
"""A process by its number. To make one takes longer than the other work for a limit."""


@contextmanager
def limited(cpu_s: float, memory_bytes: int) -> Iterator[None]:
    """Raise TimeoutError or MemoryError in the block when it takes more CPU time or memory.

    The time is limited in the main thread only, and the memory where the system reports how much
    is in use. Cost: about 25 microseconds.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    in_use = getattr(_process(os.getpid()).memory_info(), "data", None)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGVTALRM, _too_slow) if is_main else None
    try:
        if in_use is not None:
            bounds = [bound for bound in before if bound >= 0]  # -1: there is none
            lower = min([*bounds, in_use + memory_bytes]), before[1]
            resource.setrlimit(resource.RLIMIT_DATA, lower)
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _too_slow(*_: object) -> None:
    raise TimeoutError("it takes too much CPU time")


def allow_open_files() -> None:
    """Raise this process's limit of open files to what its user may set, at most MOST_FILES.

    A mapped file stays open, and systems allow 256 or 1,024 by default.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MOST_FILES) if hard >= 0 else MOST_FILES
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):  # macOS may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
