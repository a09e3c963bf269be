"""What earlier runs on this hardware needed: one small file per GPU or CPU in flatout's cache.

`train` appends each finished run, with what was predicted for it, and `bench` its full set. The
next prediction uses them: a run of the same shape says more than any formula.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from flatout.config.schema import RunConfig
from flatout.files import write_text
from flatout.measured import file_name

FORMAT_VERSION = 1
MOST_RUNS = 200
"""Runs kept per file; older ones are dropped."""


class PastRun(BaseModel):
    """One finished run: what it was, what was predicted, what was measured."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    by: Literal["train", "bench"]
    """The command that measured it."""
    recipe: str
    """Name of its recipe."""
    date: str
    """When it ended."""
    torch: str
    """Version of torch."""
    shape: str
    """Digest of the model, the sequence length and the optimizer."""
    kind: str
    """The model's kind."""
    speedups: list[str]
    """Speedups that were on."""
    rows_per_device: int
    """Sequences in a micro-batch."""
    accumulate: int
    """Micro-batches per step."""
    world_size: int
    """Processes."""
    is_compiled: bool
    """Whether anything was compiled."""
    estimate_gib: float | None = None
    """Memory of its tensors as estimated for eager mode."""
    fixed_gib: float | None = None
    """What every micro-batch needs: weights, optimizer state, and gradients if compiled."""
    variable_gib: float | None = None
    """The part of the estimate that depends on the micro-batch."""
    context_gib: float | None = None
    """Memory of the process before it built the model; on a CPU only."""
    peak_gib: float | None = None
    """Measured peak."""
    reserved_gib: float | None = None
    """Measured peak of what the allocator reserved; on a GPU only."""
    tokens_per_s: float | None = None
    """Measured steady rate."""
    mfu: float | None = None
    """Share of the peak rate that it reached."""
    compile_s: float | None = None
    """Seconds spent compiling."""
    train_s: float | None = None
    """Seconds of its steps at the steady rate."""
    score_s: float | None = None
    """Seconds of its evaluations, as estimated from the steady rate."""
    wall_s: float | None = None
    """Measured seconds, from the first step to the summary."""
    predicted_gib: float | None = None
    """Peak memory predicted before it."""
    predicted_tokens_per_s: float | None = None
    """Rate predicted before it."""
    predicted_s: float | None = None
    """Seconds predicted before it."""


def shape_of(config: RunConfig) -> str:
    """Return the digest of what decides a run's arithmetic, given a resolved configuration."""
    parts = [config.model.model_dump(mode="json"), config.data.seq_len, config.optim.kind]
    parts += [config.data.document_mask, config.train.precision]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read(hardware: str | None, cache: Path | None) -> list[PastRun]:
    """Return the runs recorded on this hardware, oldest first; none without a readable file."""
    if hardware is None or cache is None:
        return []
    try:
        document = json.loads(_path(hardware, cache).read_text(encoding="utf-8"))
        if document["format_version"] != FORMAT_VERSION or document["hardware"] != hardware:
            return []
        return [PastRun.model_validate(run) for run in document["runs"]]
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return []


def keep(hardware: str, runs: Iterable[PastRun], cache: Path) -> None:
    """Append runs to the file of this hardware; a cache that cannot be written is left alone."""
    kept = [*read(hardware, cache), *runs][-MOST_RUNS:]
    document = {
        "format_version": FORMAT_VERSION,
        "hardware": hardware,
        "runs": [run.model_dump(mode="json") for run in kept],
    }
    with suppress(OSError):
        path = _path(hardware, cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document) + "\n")


def alike(
    runs: Sequence[PastRun], *, shape: str, speedups: Iterable[str], world_size: int
) -> list[PastRun]:
    """Return the runs of one shape with the same speedups and processes, oldest first."""
    wanted = set(speedups)
    return [
        run
        for run in runs
        if run.shape == shape and set(run.speedups) == wanted and run.world_size == world_size
    ]


def _path(hardware: str, cache: Path) -> Path:
    return cache.expanduser() / "past-runs" / file_name(hardware)
