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
from flatout.hardware.machine import fingerprint


def is_cached(config: RunConfig) -> bool:
    """Return whether a run of this model, batch and machine has been compiled before.

    The answer is no where it may not depend on earlier runs: with `train.deterministic`, and with
    dropout, of which compiled code draws other numbers.
    """
    if config.train.deterministic or config.model.model_dump().get("dropout"):
        return False
    with suppress(OSError):
        return _mark(config).exists()
    return False


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
