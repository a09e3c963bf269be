"""How the processes of one run find each other: torchrun's environment variables; without them, one
process and no group.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from flatout.errors import ConfigError, RunFailed

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
BY_TORCHRUN = "Start with `torchrun --nproc-per-node N -m flatout ...`, which sets all of it."
PATIENCE_S = 600.0
"""How long a process waits for the others to start; nodes of a cluster can be minutes apart."""
WAITING_SAID_EVERY_S = 10.0
EXCHANGE_PATIENCE = timedelta(minutes=30)
"""How long processes that have met wait for each other's addresses later on."""
RELEASE_S = 0.2
"""A thread waits at most a few of Python's 5 ms turns; the rest is for a busy machine."""


@dataclass(frozen=True)
class Ranks:
    """Who this process is among the processes of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Processes on this machine."""


def stated_ranks() -> Ranks:
    """Return what the environment says, without connecting. Where LOCAL_WORLD_SIZE is missing, all
    processes are taken to be on this machine.

    Raises: ConfigError when it says only a part, or something that is not a number.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks()
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"The environment names some of the processes' variables, but not {', '.join(missing)}.",
            fix=BY_TORCHRUN,
        )
    texts = [os.environ[name] for name in VARIABLES[:3]]
    texts.append(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if not all(text.isdigit() for text in texts):
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are {', '.join(map(repr, texts))}, not numbers.",
            fix=BY_TORCHRUN,
        )
    if not os.environ["MASTER_PORT"].isdigit() or not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
        raise ConfigError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is not a port.",
            fix="Set it to a free one from 1024 to 65535.",
        )
    rank, world_size, local_rank, local_world_size = map(int, texts)
    if rank >= world_size:
        raise ConfigError(
            f"RANK={rank} does not exist among WORLD_SIZE={world_size} processes.", fix=BY_TORCHRUN
        )
    if not local_rank < local_world_size <= world_size:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} does not exist among LOCAL_WORLD_SIZE={local_world_size} of WORLD_SIZE={world_size} processes.",
            fix=BY_TORCHRUN,
        )
    return Ranks(rank, world_size, local_rank, local_world_size)


def connect(device: str) -> Ranks:
    """Join the other processes: NCCL for `cuda`, Gloo for `cpu`. A process that is alone joins
    nothing.

    Raises: ConfigError when several processes are to share one GPU, the environment is incomplete,
            or MASTER_PORT is taken; RunFailed when
    the others do not come.
    """
    ranks = stated_ranks()
    if ranks.world_size == 1 and ":" in device:
        torch.cuda.set_device(device)  # events and streams of libraries go to the current device
    if ranks.world_size == 1 or dist.is_initialized():
        return ranks
    if device == "cpu":
        _join("gloo", ranks)
        return ranks
    if device != "cuda":
        raise ConfigError(
            f"train.device={device} names one GPU, and there are {ranks.world_size} processes.",
            fix="Set train.device=cuda.",
        )
    if ranks.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Process {ranks.local_rank} of this machine finds no GPU: there are {torch.cuda.device_count()}.",
            fix=f"Start with `torchrun --nproc-per-node {max(1, torch.cuda.device_count())}`, or set train.device=cpu.",
        )
    torch.cuda.set_device(ranks.local_rank)
    _join("nccl", ranks, device_id=torch.device("cuda", ranks.local_rank))
    return ranks


def launcher() -> int | None:
    """Return the id of the process by which torchrun started this one; None when something else
    did, which may end before its processes.
    """
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _join(backend: str, ranks: Ranks, **options: Any) -> None:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        with _waiting_said(ranks, place):
            store, _, _ = next(
                rendezvous(
                    "env://", ranks.rank, ranks.world_size, timeout=timedelta(seconds=PATIENCE_S)
                )
            )
            store.set_timeout(EXCHANGE_PATIENCE)
            dist.init_process_group(
                backend, store=store, rank=ranks.rank, world_size=ranks.world_size, **options
            )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"MASTER_PORT={os.environ['MASTER_PORT']} is in use by another program on this machine.",
                fix="Set another MASTER_PORT for all processes of the run; `torchrun --standalone` finds a free one by itself.",
            ) from error
        raise RunFailed(
            f"The {ranks.world_size} processes of this run did not meet at {place} within {PATIENCE_S:.0f} s: {str(error).splitlines()[0]}",
            fix=f"Start all of them, each with its own RANK from 0 to {ranks.world_size - 1}, where {place} can be reached; or use torchrun.",
        ) from error


@contextmanager
def _waiting_said(ranks: Ranks, place: str) -> Iterator[None]:
    """Say every few seconds that this process waits for others, from a thread: each process for
    itself, since the main one may be missing.
    """
    met = threading.Event()

    def say() -> None:
        began_s = time.monotonic()
        while not met.wait(WAITING_SAID_EVERY_S):
            waited_s = time.monotonic() - began_s
            line = f"[rank {ranks.rank}] Waiting at {place} for the other processes of {ranks.world_size}: {waited_s:.0f} s of {PATIENCE_S:.0f} s"
            print(line, file=sys.stderr, flush=True)

    speaker = threading.Thread(target=say, name="flatout-rendezvous", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        met.set()
        speaker.join()


def disconnect() -> None:
    """Leave the group, if this process joined one.

    Gloo cannot be shut down: its threads let go of their last tensors a moment after the exchange
    is over, and one that does so while Python is ending aborts the process ("terminate called
    without an active exception"). They are given that moment.
    """
    if not dist.is_initialized():
        return
    backend = dist.get_backend()
    dist.destroy_process_group()
    if backend == "gloo":
        gc.collect()  # sharded models hold their groups in cycles; a group that is freed here joins its threads
        time.sleep(RELEASE_S)
