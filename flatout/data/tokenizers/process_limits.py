"""Limits that the system enforces on native code, which no signal handler or timeout of Python's
can stop.
"""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def cpu_bounded(seconds: float) -> Iterator[None]:
    """Let the system end this process with SIGXCPU when the block takes more CPU time, the time of
    all its threads together.
    """
    soft, hard = before = resource.getrlimit(resource.RLIMIT_CPU)
    ends = math.ceil(time.process_time() + seconds)
    resource.setrlimit(
        resource.RLIMIT_CPU,
        (min([ends, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]), hard),
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def bound_memory(num_bytes: int) -> None:
    """Let this process have no more than so many bytes of memory on top of those it has; where the
    system does not say, nothing is bounded.
    """
    held = getattr(psutil.Process().memory_info(), "data", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if held is not None:
        limits = [
            held + num_bytes,
            *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY),
        ]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def end_of(code: int) -> str:
    """Return how a process with such a limit ended by its exit code, as a sentence continues: it
    took too much time, or else memory.
    """
    return (
        "takes too much CPU time" if code == -signal.SIGXCPU else "crashes or takes too much memory"
    )
