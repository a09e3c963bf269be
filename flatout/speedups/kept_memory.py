"""Keep freed memory in the process, on a CPU: the next step uses it again instead of asking the
system for fresh pages.
"""

from __future__ import annotations

import ctypes
import platform

from flatout.assembly.conditions import uses_gpu
from flatout.assembly.recipe import On, Promise, Speedup
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Numbers of mallopt's settings in glibc's malloc.h."""
NEVER = -1
PAD_BYTES = 64 << 20
"""How much more than needed the heap grows by."""


def keep_freed_memory() -> None:
    """Tell glibc's allocator to give nothing back, for the rest of this process; under another C
    library nothing happens.

    By itself it maps each large tensor anew, and the system clears every page of it at first touch.
    Cost: the process keeps the most memory that it ever used.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:  # a run that began under glibc goes on elsewhere
        return
    for setting, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, PAD_BYTES)):
        mallopt(setting, value)


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if uses_gpu(machine, config):
        return "It is for tensors on a CPU; on a GPU torch keeps freed memory by itself."
    return (
        None
        if platform.libc_ver()[0] == "glibc"
        else "It is a setting of glibc's allocator, and this Python uses another C library."
    )


SPEEDUP = Speedup(
    name="kept-memory",
    fills={"allocator": keep_freed_memory},
    saves="time: no page of memory is asked for, cleared and given back in every step",
    promise=Promise.exact(),
    why_not=_why_not,
    rank=810,
    auto={"cpu": On(measured=True)},
)
