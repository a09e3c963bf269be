"""A clock of the test's own work: whatever else the machine does, nothing takes longer on it."""

import hashlib
import time
from functools import partial

ROUNDS = 150_000
"""Rounds of a hash that take about 50 ms."""


class OwnTime:
    """Stands in for the module `time`: seconds that the calling thread has computed, not waited."""

    perf_counter = staticmethod(time.thread_time)
    monotonic = staticmethod(time.monotonic)


compute = partial(hashlib.pbkdf2_hmac, "sha256", b"-", b"-", ROUNDS)
"""Compute for about 50 ms in one call, which has no frame and lets other threads run."""
