"""What else the machine does during a run: the likely causes of an alarm. No torch.

Readings of the machine are taken at the start, at the first suspicion and with the alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flatout.hardware.machine import CpuTimes

CPU_STATS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))
"""Counters of a container's CPU limit, cgroups v2 and v1."""
HEAT_COUNTS = Path("/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count")
"""How often the processor was slowed by heat, on Intel's."""
MIN_OTHER_CORES = 0.4
"""Cores of other processes that count as a change."""
FULL_MACHINE = 0.75
"""Busy share of all cores from which processes compete for them."""
LIMITED_SHARE = 0.5
"""Share of the scheduler's periods stopped by a container's CPU limit that counts as throttling."""


class GpuState(NamedTuple):
    """What the driver reports of the GPU now. None if not reported."""

    slowed_by: tuple[str, ...] | None
    """Heat and other faults that slow it down. Its power cap is not one."""
    is_at_power_cap: bool | None
    processes: int | None
    clock_mhz: float | None


class Surroundings:
    """Compares the machine during a change with the time before it."""

    def __init__(
        self,
        *,
        cores: int,
        read_gpu: Callable[[], GpuState | None] = lambda: None,
        read_load: Callable[[], CpuTimes] = CpuTimes.read,
        read_limits: Callable[[], tuple[int, int, int]] | None = None,
    ) -> None:
        self._cores = cores
        self._read_gpu, self._read_load = read_gpu, read_load
        self._read_limits = read_limits or limit_counts
        self._start = read_load()
        self._suspected: CpuTimes | None = None
        self._limits = self._read_limits()
        self._first_gpu: GpuState | None = None
        self._gpu: GpuState | None = None

    def suspect(self, is_suspicious: bool) -> None:
        """Note whether the latest metrics are unusual. The first such moment divides the times."""
        if not is_suspicious:
            self._suspected = None
        elif self._suspected is None:
            self._suspected = self._read_load()

    def throttled_by(self) -> str | None:
        """Return why the device or the process is being slowed down, None if it is not.

        It covers the time since the previous call, on a GPU the present.
        """
        before, self._limits = self._limits, self._read_limits()
        periods, stopped, hot = (now - then for now, then in zip(self._limits, before, strict=True))
        self._gpu = self._read_gpu()
        self._first_gpu = self._first_gpu or self._gpu
        if self._gpu is not None and self._gpu.slowed_by:
            return f"the GPU is slowed down by {' and '.join(self._gpu.slowed_by)}"
        if hot > 0:
            return "heat slows the processor down"
        if periods > 0 and stopped / periods > LIMITED_SHARE:
            return (
                f"the container's CPU limit stopped the process in {stopped / periods:.0%} of the "
                "scheduler's periods"
            )
        return None

    def other_load(self) -> str | None:
        """Return how other processes compete for the cores since the suspicion, None if not."""
        if self._suspected is None:
            return None
        now = self._read_load()
        before = self._start.others_until(self._suspected)
        during = self._suspected.others_until(now)
        busy = (now.used_s - self._suspected.used_s) / (now.at_s - self._suspected.at_s)
        is_full = busy > FULL_MACHINE * self._cores
        if during - before < MIN_OTHER_CORES or not is_full:
            return None
        return f"other processes use {during:.1f} of {self._cores} cores, up from {before:.1f}"

    def gpu_change(self) -> str | None:
        """Return what changed on the GPU since the run's first reading, None if nothing did."""
        first, now = self._first_gpu, self._read_gpu()
        if first is None or now is None:
            return None
        if now.processes and first.processes and now.processes > first.processes:
            return f"{now.processes - first.processes} more process uses the GPU"
        if now.clock_mhz and first.clock_mhz and now.clock_mhz < 0.93 * first.clock_mhz:
            cap = ", at its power cap" if now.is_at_power_cap else ""
            return (
                f"the GPU's clock fell from {first.clock_mhz:,.0f} to {now.clock_mhz:,.0f} MHz{cap}"
            )
        return None


def limit_counts() -> tuple[int, int, int]:
    """Return the scheduler's periods, those that a container's limit stopped, and slow-downs by
    heat. 0 where the system has no such counter.
    """
    periods = stopped = 0
    for path in CPU_STATS:
        counts = dict(line.split() for line in _read(path).splitlines() if line.count(" ") == 1)
        if "nr_periods" in counts:
            periods, stopped = int(counts["nr_periods"]), int(counts.get("nr_throttled", 0))
            break
    heat = _read(HEAT_COUNTS).strip()
    return periods, stopped, int(heat) if heat.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
