"""The specification of a measured run of `diagnose`, passed between processes. No torch."""

from __future__ import annotations

from typing import Any

from flatout.storage.files import Stored

DEFAULT_SECONDS = 4.0
"""Seconds of ordinary steps that are measured."""
LIMIT_S = 150.0
"""Longest measured run before it counts as hanging. More seconds of steps extend it."""


class MeasureSpec(Stored):
    """What to measure, and for how long."""

    config: dict[str, Any]
    """The requested configuration."""
    folder: str
    """Scratch directory for the files of the run, on the disk of its checkpoints."""
    cache: str | None = None
    """flatout's cache, with the gains measured here. None means no gains."""
    seconds: float = DEFAULT_SECONDS
    """Seconds of ordinary steps."""
    warmup_s: float = 10.0
    """Latest end of the warm-up, counted from the end of the first step."""
    limit_s: float = LIMIT_S
    """Time after which the run counts as hanging."""
