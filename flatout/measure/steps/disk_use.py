"""How much a process reads from disks, and how long it waits for them, as Linux counts it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_IO, _PRESSURE = Path("/proc/self/io"), Path("/proc/pressure/io")


@dataclass(frozen=True)
class DiskUse:
    """Totals, or their difference; None where the system does not count them."""

    read_bytes: int | None
    """Bytes that came from a disk and not from memory."""
    stalled_s: float | None
    """Seconds at which some process of the machine waited for a disk."""

    def __sub__(self, other: DiskUse) -> DiskUse:
        read_bytes = stalled_s = None
        if self.read_bytes is not None and other.read_bytes is not None:
            read_bytes = self.read_bytes - other.read_bytes
        if self.stalled_s is not None and other.stalled_s is not None:
            stalled_s = self.stalled_s - other.stalled_s
        return DiskUse(read_bytes, stalled_s)


def disk_use() -> DiskUse:
    """Return this process's totals so far."""
    read = re.search(r"^read_bytes: (\d+)$", _text(_IO), re.MULTILINE)
    stalled = re.search(r"^some .*total=(\d+)$", _text(_PRESSURE), re.MULTILINE)
    return DiskUse(int(read[1]) if read else None, 1e-6 * int(stalled[1]) if stalled else None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # other systems, and containers that hide it
        return ""
