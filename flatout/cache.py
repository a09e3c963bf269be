"""The user's cache directory: downloads, copies of remote datasets and measured results."""

from __future__ import annotations

from pathlib import Path

CACHE = Path("~/.cache/flatout")
"""Not expanded: each caller expands it when it reads or writes."""
