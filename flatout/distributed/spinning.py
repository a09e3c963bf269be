"""How long torch's threads spin while they wait: long alone, briefly beside other processes.

GNU OpenMP lets a waiting thread spin for milliseconds, which is fastest on an idle machine and
several times slower on a shared one: the thread keeps a core from those that it waits for. A
process with more OpenMP threads than cores spins 3,000 times less (`GOMP_SPINCOUNT` in libgomp's
manual). So while others use the cores, one more team of threads exists here, asleep. The number of
threads that compute stays, and no result changes.
"""

from __future__ import annotations

import sys
import threading
import time

import psutil

from flatout.distributed.launch import stated_variables
from flatout.hardware.machine import BUSY_CORES, CpuTimes, usable_cores
from flatout.progress import Progress

EVERY_S = 1.0
"""Seconds between looks at the use of the cores."""
LOOK_S = 0.2
"""Seconds that a look takes, at least."""
NAME = "flatout-spinning"


def spin_less_beside_others(progress: Progress, began: CpuTimes | None = None) -> None:
    """Watch the use of the cores from now on, in the background. The first look is at once.

    It counts the use since `began`, and acts once torch is loaded. Does nothing when called again,
    with one core, and when the environment states how many threads there are or how they wait.
    """
    stated = stated_variables(["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
    if stated or usable_cores() == 1 or NAME in (each.name for each in threading.enumerate()):
        return
    before = began or CpuTimes.read()
    threading.Thread(target=_watch, args=(progress, before), name=NAME, daemon=True).start()


def _watch(progress: Progress, before: CpuTimes) -> None:
    pause, freed, was_said = threading.Event(), None, False
    pause.wait(before.at_s + LOOK_S - time.monotonic())
    while True:
        others = before.others_until(CpuTimes.read())
        if others > BUSY_CORES and freed is None:  # it may be a child, such as a compiler
            started = CpuTimes.read(psutil.Process().children(recursive=True))
            pause.wait(LOOK_S)
            others = started.others_until(CpuTimes.read(psutil.Process().children(recursive=True)))
        if others > BUSY_CORES and freed is None and "torch" in sys.modules:
            freed = threading.Event()
            threading.Thread(target=_keep_a_team, args=(freed,), daemon=True).start()
            if not was_said:
                progress.say(
                    f"This machine is busy ({others:.1f} of {usable_cores()} cores); timings will "
                    "vary."
                )
            was_said = True
        elif others <= BUSY_CORES and freed is not None:
            freed.set()
            freed = None
        before = CpuTimes.read()
        pause.wait(EVERY_S)


def _keep_a_team(freed: threading.Event) -> None:
    """Keep one more team of OpenMP threads until `freed` is set. It ends with this thread."""
    import torch

    torch.zeros(1 << 17, dtype=torch.int8).add_(1)  # large enough for two threads
    freed.wait()
