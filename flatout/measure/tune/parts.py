"""The parts of a run that `flatout tune` varies, and the words of `--only`; without torch."""

from __future__ import annotations

from flatout.registry import SPEEDUPS, unknown_name

PARTS = ("batch", "checkpointing", "speedups", "prefetch")
"""What can be tuned; the order is that of the first measurements."""

LEAST_MINUTES = 1.0
"""The shortest time limit: in less, hardly more than the start of one trial fits."""


def parse_only(text: str | None) -> tuple[str, ...]:
    """Return the parts and speedups that `--only` names; all parts without it.

    Raises: ConfigError for an unknown one, with the nearest name.
    """
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    known = [*PARTS, *(name for name in SPEEDUPS.names() if name not in PARTS)]
    for word in words:
        if word not in known:
            raise unknown_name("part to tune", word, known)
    return words or PARTS
