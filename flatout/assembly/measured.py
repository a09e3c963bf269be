"""What was measured on this hardware: the gains of speedups, and the rates of finished runs.

One file per GPU or CPU in flatout's cache has the gains that `bench` measured, which `auto` prefers
to the defaults in the speedups' own files and `list speedups` shows, and the rates of finished
runs, from which `plan` predicts others. torch is imported only to name a GPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from flatout.assembly.choices import Decision, Gain, speedups_for
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.hardware.machine import Machine
from flatout.storage.files import Stored, lock, write_text

FORMAT_VERSION = 1
MINUTES = 30
"""Suggested --minutes on a GPU: about 40 trials, assumed to take 20 s each with start and
compilation, and two rounds.
"""
MOST_RUNS = 200
"""Runs kept per file. Older ones are dropped."""
LOCK_S = 10.0
"""How long a process waits for others that write the same file."""
SIMILAR = 4
"""Ratio of FLOPs per token below which the rate, or a gain, of one model is taken for another's."""
BY_TOKENS = "batch.by_tokens"
EVALUATION_COST = 3
"""A training token costs as much as this many evaluated ones: forward, and backward twice that."""


class PastRun(Stored, extra="ignore"):
    """One finished run: what it was, and what was measured."""

    by: Literal["train", "bench"]
    """The command that measured it."""
    digest: str
    """Digest of all that decides its arithmetic but the micro-batch."""
    kind: str
    """The model's kind."""
    speedups: list[str]
    """Speedups that were on, in order of their names, then batch.by_tokens and the keys of
    `parallel` that were set."""
    rows_per_device: int
    """Sequences in a micro-batch."""
    accumulate: int
    """Micro-batches per step."""
    world_size: int
    """Processes."""
    is_compiled: bool
    """Whether anything was compiled."""
    is_busy: bool = False
    """Whether other processes used the cores meanwhile, on a CPU only."""
    tokens_per_s: float = 0.0
    """Measured steady rate. 0 if not measured."""
    flops_per_token: float = 0.0
    """FLOPs of a token. 0 if not known."""
    beside_s: float | None = None
    """Seconds besides its steps and evaluations at the steady rate: start, compiling, saves."""
    cached_s: float = 0.0
    """The part of it in which torch compiled what it then kept on disk."""


class MeasuredHere(Stored):
    """The file of one GPU or CPU."""

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    hardware: str
    """The GPU as its driver names it, or the CPU and its cores."""
    speedups: dict[str, Gain] | None = None
    """Gains by name and FLOPs per token, `compile@2.4e+06`. Null means nothing has been measured,
    and the user has not been told so."""
    runs: tuple[PastRun, ...] = ()
    """Finished runs, oldest first."""


def hardware_name(machine: Machine, device: str) -> str | None:
    """Return the GPU of a run on `device`, or the CPU with its cores. None for an absent GPU.

    On this machine torch names it: CUDA_VISIBLE_DEVICES hides and orders GPUs, and the driver lists
    all of them in its own order.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return f"{machine.cpu_name}, {machine.cores} cores" + (", MPS" if device == "mps" else "")
    if machine.is_here and machine.gpus:
        import torch

        if int(index or 0) < torch.cuda.device_count():
            return torch.cuda.get_device_name(device)
    return next((gpu.name for gpu in machine.gpus[int(index or 0) :]), None)


def read(hardware: str | None, cache: Path | None) -> MeasuredHere:
    """Return what was measured on this hardware: nothing without a file that this version reads."""
    nothing = MeasuredHere(hardware=hardware or "")
    if hardware is None or cache is None:
        return nothing
    try:
        found = MeasuredHere.model_validate_json(_path(hardware, cache).read_text("utf-8"))
    except (OSError, ValueError):
        return nothing
    is_own = found.hardware == hardware and found.format_version == FORMAT_VERSION
    return found if is_own else nothing


def keep(
    hardware: str, cache: Path, gains: Mapping[str, Gain] | None = None, run: PastRun | None = None
) -> Path:
    """Add gains or a run to the file of this hardware. Return its path.

    A gain replaces the earlier ones of its speedup with similar models. Processes that end at the
    same time take turns.

    Raises: OSError when the cache cannot be written.
    """
    path = _path(hardware, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as file:
        with suppress(OSError):  # a disk without locks
            lock(file.fileno(), wait_s=LOCK_S)
        found = read(hardware, cache)
        if gains is not None:
            kept = {
                key: gain
                for key, gain in (found.speedups or {}).items()
                if (new := gains.get(key.partition("@")[0])) is None
                or not similar(gain.flops_per_token, new.flops_per_token)
            }
            kept |= {f"{name}@{gain.flops_per_token:.3g}": gain for name, gain in gains.items()}
            found = found.model_copy(update={"speedups": kept})
        if run is not None:
            found = found.model_copy(update={"runs": (*found.runs, run)[-MOST_RUNS:]})
        write_text(path, found.model_dump_json(indent=1) + "\n")
    return path


def _path(hardware: str, cache: Path) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return cache.expanduser() / "measured" / f"{name}.json"


def gains_here(
    machine: Machine,
    device: str,
    cache: Path | None,
    flops_per_token: Callable[[], float] | None = None,
) -> dict[str, Gain]:
    """Return the gains measured on the hardware of `device` with the torch in use, by speedup.

    They are those of models with similar FLOPs per token, of several the nearest. Without
    `flops_per_token`, the last of any model. Without a `cache` there are none.
    """
    here = version("torch").partition("+")[0]  # 2.13.0+cu130 and 2.13.0+cpu are the same release
    stored = read(hardware_name(machine, device), cache).speedups or {}
    gains = [
        (key.partition("@")[0], gain)
        for key, gain in stored.items()
        if gain.torch.partition("+")[0] == here
    ]
    if gains and flops_per_token is not None:
        flops = flops_per_token()
        near = [(name, gain) for name, gain in gains if similar(gain.flops_per_token, flops)]
        gains = sorted(near, key=lambda each: -abs(math.log(each[1].flops_per_token / flops)))
    return dict(gains)


def similar(flops_per_token: float, other: float) -> bool:
    """Return whether two numbers of FLOPs per token are known, and within SIMILAR times."""
    return 0 < flops_per_token < SIMILAR * other and other < SIMILAR * flops_per_token


def runs_here(machine: Machine, device: str, cache: Path | None) -> Sequence[PastRun]:
    """Return the runs recorded on the hardware of `device`, oldest first."""
    return read(hardware_name(machine, device), cache).runs


def advice(gpu: str, recipe: str, cache: Path) -> str | None:
    """Return the hint for the first run on a GPU without measurements. None from the second on."""
    if read(gpu, cache).speedups is not None:
        return None
    with suppress(OSError):  # the hint is then repeated at the next run
        keep(gpu, cache, {})
    return (
        f"No speedup has been measured on this GPU ({gpu}). `flatout bench {recipe} --minutes "
        f"{MINUTES}`, with this run's settings, measures them in about {MINUTES} minutes."
    )


def speedups_on(decisions: Iterable[Decision]) -> list[str]:
    """Return the speedups that are on, apart from one that only chose the micro-batch."""
    on = [decision.name for decision in decisions if decision.on]
    return [name for name in on if name not in speedups_for("most_rows")]


def past_run(
    config: RunConfig,
    decisions: Iterable[Decision],
    world_size: int = 1,
    *,
    dataset: AnyDataset | None = None,
    by: Literal["train", "bench"] = "train",
    **measured: Any,
) -> PastRun:
    """Return the record of a resolved run with what was measured.

    Where rows are documents, their mean length in the `dataset` decides the arithmetic too.
    """
    names = sorted(speedups_on(decisions))
    layout = config.parallel.model_dump(exclude={"replicate"}, exclude_defaults=True)
    speedups = [*names, *[BY_TOKENS] * config.batch.by_tokens]
    speedups += [f"parallel.{key}={value}" for key, value in layout.items()]
    parts = [
        config.model.model_dump(mode="json"),
        config.data.seq_len,
        config.optim.kind,
        config.data.document_mask,
        config.train.precision,
        speedups,
        world_size,
        config.lora.model_dump(mode="json"),
    ]
    if dataset is not None and speedups_for("batching", names):
        split: Any = dataset.split("train")
        parts.append(f"{split.num_tokens / max(split.num_documents, 1):.1e}")
    return PastRun(
        by=by,
        digest=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16],
        kind=config.model.kind,
        speedups=speedups,
        rows_per_device=int(config.batch.rows_per_device),
        accumulate=config.batch.accumulate or 1,
        world_size=world_size,
        is_compiled=bool(speedups_for("compilation", names)),
        **measured,
    )
