"""Connects the processes of a run by torchrun's environment variables, which `launch` also sets.

Without these variables there is one process and no group.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
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
from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import rendezvous

from flatout.distributed.launch import LAUNCHER
from flatout.errors import ConfigError, RunFailed

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
USE_TORCHRUN = "Start with `torchrun --nproc-per-node N -m flatout ...`, which sets all of them."
OF_A_GPU = "cpu:gloo,cuda:nccl"
"""NCCL moves tensors of GPUs. Objects, such as the plan of a run, and offloaded tensors take the
CPU's way.
"""
START_TIMEOUT_S = 600.0
"""How long a process waits for the others to start. Nodes of a cluster can start minutes apart."""
REPORT_AFTER_S = 10.0
"""How long a process waits before it says so."""
TIMEOUT = timedelta(hours=6)
"""How long connected processes wait for each other: rank 0 may download a dataset or a checkpoint,
or hash large ones. A process that ends is noticed at once, and the watchdog reports one that hangs.
"""
STEP_TIMEOUT = timedelta(minutes=10)
"""How long they wait for each other once the first step is done, as `expect_steps` sets it."""
RELEASE_S = 0.2
"""A thread waits for at most a few of Python's 5 ms switch intervals. The rest is a margin for a
busy machine.
"""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process in the run and on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Processes on this machine."""


def stated_ranks() -> Ranks:
    """Return the ranks that the environment variables give, without connecting.

    Without LOCAL_WORLD_SIZE, all processes are assumed to be on this machine.
    Raises: ConfigError when a variable is missing, or has no value that torchrun sets.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks()
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"The environment sets some variables of torchrun, but not {', '.join(missing)}.",
            fix=USE_TORCHRUN,
        )
    stated = {name: os.environ[name] for name in VARIABLES if name != "MASTER_ADDR"}
    stated["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", stated["WORLD_SIZE"])
    if all(text.isdigit() for text in stated.values()):
        rank, world_size, local_rank, port, local_world_size = map(int, stated.values())
        if rank < world_size and local_rank < local_world_size <= world_size and 0 < port < 2**16:
            return Ranks(rank, world_size, local_rank, local_world_size)
    listed = ", ".join(f"{name}={text}" for name, text in stated.items())
    raise ConfigError(f"The environment has {listed}, which is impossible.", fix=USE_TORCHRUN)


def expect_steps() -> None:
    """Wait at most STEP_TIMEOUT in a collective from now on: a rank that hangs ends the run.

    Downloads and the hashing of large files are over after the first step. A single process does
    nothing.
    """
    if dist.is_initialized():
        for group in [*dist.distributed_c10d._world.pg_map]:  # there is no public function
            dist.distributed_c10d._set_pg_timeout(STEP_TIMEOUT, group)


def connect(device: str) -> Ranks:
    """Join the other processes over NCCL or, on CPUs, Gloo. A single process does nothing.

    Raises: ConfigError when several processes would share one GPU, the environment is incomplete,
            or MASTER_PORT is in use; RunFailed when the other processes do not join in time.
    """
    ranks = stated_ranks()
    if ranks.world_size == 1 and ":" in device:
        torch.cuda.set_device(device)  # libraries create events and streams on the current device
    if ranks.world_size == 1 or dist.is_initialized():
        return ranks
    if device == "cpu":
        _join("gloo", ranks)
        return ranks
    if device != "cuda":
        raise ConfigError(
            f"train.device={device} names one GPU, but there are {ranks.world_size} processes.",
            fix="Set train.device=cuda, or train.device=cpu.",
        )
    if ranks.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"There is no GPU for local rank {ranks.local_rank}: this machine has "
            f"{torch.cuda.device_count()}.",
            fix=f"Start with `torchrun --nproc-per-node {max(1, torch.cuda.device_count())}`, or "
            "set train.device=cpu.",
        )
    torch.cuda.set_device(ranks.local_rank)
    _join(OF_A_GPU, ranks, device_id=torch.device("cuda", ranks.local_rank))
    return ranks


def connect_alone(device: torch.device) -> None:
    """Make this process a group of one, unless it is in a group: torch's offload needs one."""
    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = OF_A_GPU if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    atexit.register(disconnect)


def is_elastic() -> bool:
    """Return whether torchrun starts the processes, which may continue with fewer of them."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher() -> int | None:
    """Return the id of the process that started this rank, torchrun or `flatout train`, or None.

    Other launchers may end before their processes.
    """
    own = os.environ.get(LAUNCHER, "")
    if own.isdigit():
        return int(own)
    return os.getppid() if is_elastic() else None


def _join(backend: str, ranks: Ranks, **options: Any) -> None:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        with _wait_reported(ranks, address), _ended_by_signals():
            store, _, _ = next(
                rendezvous(
                    "env://",
                    ranks.rank,
                    ranks.world_size,
                    timeout=timedelta(seconds=START_TIMEOUT_S),
                )
            )
            store.set_timeout(TIMEOUT)
            dist.init_process_group(
                backend,
                store=store,
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=TIMEOUT,
                **options,
            )
    except (RuntimeError, OSError) as error:  # torch has no common class for these errors
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"MASTER_PORT={os.environ['MASTER_PORT']} is in use by a different process on this "
                "machine.",
                fix="Set a different MASTER_PORT for all processes of the run. "
                "`torchrun --standalone` finds a free one.",
            ) from error
        what = (
            f"The {ranks.world_size} processes of this run did not connect at {address}: "
            f"{str(error).splitlines()[0]}."
        )
        fix = (
            f"Start each process with a different RANK from 0 to {ranks.world_size - 1}, on "
            f"machines that can reach {address}, or use torchrun."
        )
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            fix = (
                "torchrun may have kept the addresses of processes that it has restarted: set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun."
            )
        raise RunFailed(what, fix=fix) from error


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the operating system end this process at a signal.

    torch waits for other processes, for minutes, without returning to Python, which therefore runs
    no handler. Nothing is lost: the run has not started.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _wait_reported(ranks: Ranks, address: str) -> Iterator[None]:
    """Say that this process waits for the others, if it does for long. Rank 0 may be missing."""
    line = (
        f"[rank {ranks.rank}] Waiting at {address} for the other processes of {ranks.world_size}, "
        f"up to {START_TIMEOUT_S:.0f} s."
    )
    timer = threading.Timer(REPORT_AFTER_S, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def disconnect() -> None:
    """Leave the group, if this process joined one.

    Gloo cannot be shut down: its threads release their last tensors a moment after the last
    operation, and one that does so while Python exits aborts the process ("terminate called without
    an active exception"). This waits for that moment.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    gc.collect()  # sharded models keep their groups in cycles. Freeing a group joins its threads
    time.sleep(RELEASE_S)


def silence_profiler() -> None:
    """Keep torch's profiler from writing its own log lines to standard error.

    It must be called before the profiler starts for the first time.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
