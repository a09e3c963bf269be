"""Hides known log lines of other packages about features that flatout does not use."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

NOISE = {
    "torchao": r"Failed to load \S+/_C\w*\.\S*so: ",
    "torch.utils._pytree": (
        r"<enum 'KernelPreference'> is an Enum subclass and is now natively supported"
    ),
}
"""The start of each hidden line, by logger: torchao's kernels for unused formats and other Python
versions, and a deprecation between torchao and torch.
"""


@contextmanager
def without_noise() -> Iterator[None]:
    """Return a context that hides these lines and shows all others."""
    filters = {logging.getLogger(name): _Dropping(pattern) for name, pattern in NOISE.items()}
    for logger, dropping in filters.items():
        logger.addFilter(dropping)
    try:
        yield
    finally:
        for logger, dropping in filters.items():
            logger.removeFilter(dropping)


class _Dropping(logging.Filter):
    """Drops records that start with a pattern."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self._pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show `record`."""
        return self._pattern.match(record.getMessage()) is None
