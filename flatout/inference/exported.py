"""Tells the runs of this project from models of other tools. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from flatout.training.run_dir.layout import CONFIG


def is_run(path: Path | str | None) -> bool:
    """Return whether a command reads a run, not another tool's model. None is the newest run.

    What does not exist counts as the name of a run.
    """
    if path is None or str(path).startswith("hf:"):
        return path is None
    return not os.path.exists(path) or (Path(path) / CONFIG).is_file()
