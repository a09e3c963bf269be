"""Resource limits of the operating system, for native code that Python cannot interrupt."""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

MOST_FILES = 65_536


@contextmanager
def cpu_bounded(seconds: float) -> Iterator[None]:
    """End this process with SIGXCPU if the block uses more CPU time, summed over all threads."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def bound_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` of memory more than it has now.

    Does nothing where the system does not report the memory in use.
    """
    in_use = getattr(psutil.Process().memory_info(), "data", None)
    if in_use is not None:
        _lower(resource.RLIMIT_DATA, in_use + num_bytes)


def allow_open_files() -> None:
    """Raise this process's limit of open files to what its user may set, at most MOST_FILES.

    A mapped file stays open, and systems allow 256 or 1,024 by default.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _lower(limit: int, value: int) -> None:
    soft, hard = resource.getrlimit(limit)
    finite = (bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)
    resource.setrlimit(limit, (min([value, *finite]), hard))


def failure_of(code: int) -> str:
    """Return a verb phrase for how a process with these limits ended, from its exit code."""
    if code == -signal.SIGXCPU:
        return "takes too much CPU time"
    return "crashes or takes too much memory"
