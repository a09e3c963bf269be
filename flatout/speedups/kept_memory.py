"""Keep freed memory in the process, on a CPU: later steps reuse it instead of mapping new pages."""

from __future__ import annotations

import ctypes
import platform

from flatout.assembly.recipe import On, Speedup, Tolerance, first_of, needs_cpu

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Numbers of mallopt's settings in glibc's malloc.h."""
NEVER = -1
PAD_BYTES = 64 << 20
"""Extra bytes by which the heap grows beyond what is needed."""


def keep_freed_memory() -> None:
    """Tell glibc's allocator to return no memory to the system, for the rest of this process.

    By default it maps every large tensor again, and the system clears every page at first touch.
    With a different C library, on which a run that started with glibc may resume, this does
    nothing.
    Cost: the process keeps the peak of the memory it used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for setting, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, PAD_BYTES)):
        mallopt(setting, value)


SPEEDUP = Speedup(
    name="kept-memory",
    fills={"allocator": keep_freed_memory},
    saves="time: steps reuse memory instead of mapping, clearing and returning pages",
    tolerance=Tolerance.exact(),
    why_not=first_of(
        needs_cpu,
        lambda _machine, _config: (
            None
            if platform.libc_ver()[0] == "glibc"
            else "It needs glibc's allocator, but this Python uses a different C library."
        ),
    ),
    rank=810,
    auto={"cpu": On(measured=True)},
)
