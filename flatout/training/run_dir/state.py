"""The state of a run, from the files of its directory. No torch."""

from __future__ import annotations

import signal
from pathlib import Path

from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import is_locked


def run_state(run_folder: Path) -> str:
    """Return running, finished, stopped, interrupted, failed, killed (no exit code) or new."""
    if is_locked(run_folder):
        return "running"
    code = layout.read_exit_code(run_folder)
    if code is None:
        if layout.read_summary(run_folder) is not None:
            return "finished"
        return "killed" if (run_folder / layout.EVENTS).exists() else "new"
    if code in {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}:
        return "interrupted"
    return {0: "finished", 75: "stopped"}.get(code, "failed")
