"""The user's cache directory: downloads, copies of remote datasets and measured results."""

from __future__ import annotations

from pathlib import Path

CACHE = Path("~/.cache/flatout")
"""Callers expand the `~` when they read or write."""
