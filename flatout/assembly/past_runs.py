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

from pydantic import BaseModel, ConfigDict

from flatout.assembly.measured import file_name
from flatout.assembly.memory import MemoryEstimate
from flatout.config.schema import RunConfig
from flatout.files import write_text
from flatout.json_io import Stored

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
    is_busy: bool = False
    """Whether other processes used the cores meanwhile; on a CPU only."""
    flatout: str | None = None
    """Version of flatout."""
    estimate: MemoryEstimate | None = None
    """Memory of its tensors as estimated for eager mode, in bytes."""
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
    train_s: float | None = None
    """Seconds of its steps at the steady rate."""
    score_s: float | None = None
    """Seconds of its evaluations, as estimated from the steady rate."""
    wall_s: float | None = None
    """Measured seconds, from the first step to the summary."""
    cached_s: float = 0.0
    """The part of it in which torch compiled what it then kept on disk."""
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
    if config.lora.rank is not None:
        parts.append(config.lora.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class PastRuns(Stored):
    """The file of one GPU or CPU."""

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    hardware: str
    """The GPU as its driver names it, or the CPU and its cores."""
    runs: list[PastRun]
    """Oldest first."""


def read(hardware: str | None, cache: Path | None) -> list[PastRun]:
    """Return the runs recorded on this hardware, oldest first; none without a readable file."""
    if hardware is None or cache is None:
        return []
    try:
        found = PastRuns.model_validate_json(_path(hardware, cache).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    known = (found.format_version, found.hardware) == (FORMAT_VERSION, hardware)
    return found.runs if known else []


def keep(hardware: str, run: PastRun, cache: Path) -> None:
    """Append a run to the file of this hardware; a cache that cannot be written is left alone."""
    kept = PastRuns(hardware=hardware, runs=[*read(hardware, cache), run][-MOST_RUNS:])
    with suppress(OSError):
        path = _path(hardware, cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, kept.model_dump_json() + "\n")


def alike(
    runs: Sequence[PastRun], shape: str, speedups: Iterable[str], world_size: int
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
