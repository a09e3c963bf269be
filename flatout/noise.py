"""What other packages log while they are imported about parts of theirs that nothing here calls:
exactly these lines are not shown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

NOISE = {
    "torchao": r"Failed to load \S+/_C\w*\.\S*so: ",
    "torch.utils._pytree": r"<enum 'KernelPreference'> is an Enum subclass and is now natively supported",
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward from kernels-community: ",
}
"""Loggers, and how what they say begins: torchao's kernels for other versions of Python and for
formats that are not used, a
deprecation between torchao and torch, and bitsandbytes' kernel for weights of four bits."""


@contextmanager
def without_noise() -> Iterator[None]:
    """Return a context of imports in which those lines are dropped, and every other one is shown."""
    filters = {logging.getLogger(name): _Dropping(pattern) for name, pattern in NOISE.items()}
    for logger, dropping in filters.items():
        logger.addFilter(dropping)
    try:
        yield
    finally:
        for logger, dropping in filters.items():
            logger.removeFilter(dropping)


class _Dropping(logging.Filter):
    """Lets through what does not begin like the noise."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self._pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is shown."""
        return self._pattern.match(record.getMessage()) is None
