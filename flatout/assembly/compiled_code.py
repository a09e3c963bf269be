"""Marks in torch's cache of compiled code, which tell for which runs it has been compiled.

Compiling takes half a minute, and loading compiled code a few seconds: with a mark, `auto` compiles
shorter runs too. A mark is deleted together with the code. If it is wrong, because a detail that it
does not state has changed, the run compiles again.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.hardware.machine import BUSY_CORES, fingerprint, other_busy_cores, usable_cores

MEASURED_FROM = 1
"""Minutes of a run that is compiled on an idle machine."""
CACHED = 0.1
"""Time of loading compiled code, relative to compiling."""
LEAST_FREE = 0.1
"""Share of the cores that is taken to be free on the busiest machine."""


def compile_cost(config: RunConfig, minutes: float | None) -> float:
    """Return the time of compiling relative to an idle machine without the code of this run.

    It is 1 where it may not depend on that: with `train.deterministic`, and with dropout, of which
    compiled code draws other numbers. The load of the machine is measured for a run of at least
    MEASURED_FROM minutes.
    """
    if config.train.deterministic or config.model.model_dump().get("dropout"):
        return 1.0
    with suppress(OSError):
        if _mark(config).exists():
            return CACHED
    others = other_busy_cores() if (minutes or 0) >= MEASURED_FROM else 0.0
    return 1 / max(1 - others / usable_cores(), LEAST_FREE) if others > BUSY_CORES else 1.0


def mark_as_cached(config: RunConfig) -> None:
    """Record that the code of a run has been compiled. A cache that is read-only stays unmarked."""
    with suppress(OSError):
        mark = _mark(config)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()


def _mark(config: RunConfig) -> Path:
    """Return the mark of a run, whose speedups may be resolved or not."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    stated = [
        version("flatout"),
        fingerprint(config.train.device),
        *(config.model.model_dump(), config.lora.model_dump(), config.parallel.model_dump()),
        *(config.data.seq_len, config.data.document_mask, config.batch.tokens_per_step),
    ]
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()
    return Path(cache_dir()) / "flatout" / digest[:32]
