"""The C library's heap on a CPU: it keeps freed memory, so that later steps map no new pages."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Numbers of mallopt's settings in glibc's malloc.h."""
NEVER = -1
PAD_BYTES = 64 << 20
"""Extra bytes by which the heap grows beyond what is needed."""


def keep_freed_memory() -> None:
    """Tell glibc's allocator to return no memory to the system, for the rest of this process.

    By default it maps every large tensor again, and the system clears every page at first touch.
    With a different C library, this does nothing.
    Cost: the process keeps the peak of the memory it used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for setting, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, PAD_BYTES)):
        mallopt(setting, value)
