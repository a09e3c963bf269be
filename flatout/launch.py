"""Starts the processes of `train.devices` on this machine, and ends them together.

Each process is a rank: it runs the same command line, with the environment variables that torchrun
sets. The main rank has the terminal; of the others, only errors are shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from flatout.errors import ConfigError, HardwareError, Interrupted, RunFailed, Stopped
from flatout.hardware import Machine, pick_device

LAUNCHER = "FLATOUT_LAUNCHER"
"""The environment variable with the id of the process that started a rank."""
POLL_S = 0.05
KILL_AFTER_S = 10.0
"""Seconds after the first failure until the other processes are killed: they may be waiting for the
failed one in an operation that no signal interrupts.
"""


def num_processes(devices: int | str | None, device: str, machine: Machine) -> int:
    """Return how many processes `train.devices` asks for on this machine.

    `all` is one for each GPU that torch sees, and 1 on a CPU.
    Raises: ConfigError when `device` is a single GPU; HardwareError when there are not so many, or
            as `pick_device`.
    """
    if devices in (None, 1):
        return 1
    if ":" in device:
        raise ConfigError(
            f"train.device={device} is one GPU, and train.devices={devices} asks for more.",
            fix="Set train.device=cuda, or leave train.devices out.",
        )
    chosen, _ = pick_device(device, machine)
    if chosen == "cpu":
        return 1 if devices == "all" else int(devices or 1)
    import torch

    count = torch.cuda.device_count() if chosen != "mps" else 1
    if devices == "all":
        return count
    if int(devices or 1) > count:
        raise HardwareError(
            f"train.devices={devices} needs as many GPUs, and torch sees {count}.",
            fix="Set train.devices=all, or train.device=cpu.",
        )
    return int(devices or 1)


def program(words: Sequence[str]) -> list[str]:
    """Return a command that runs `flatout WORDS` with the import path of this process."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from flatout.cli import main; main()"
    return [sys.executable, "-c", code, *words]


def launch(command: Sequence[str], count: int, environment: Mapping[str, str], cores: int) -> int:
    """Run a command as `count` ranks, and return the exit code of the run.

    When one of them fails, the others are ended. Threads are limited to the rank's share of the
    `cores`, unless OMP_NUM_THREADS is set.
    Raises: RunFailed when a process other than the main one failed, or one was killed; Interrupted
            when a signal arrived before all had started.
    """
    shared = {
        "OMP_NUM_THREADS": str(max(1, cores // count)),
        **environment,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        LAUNCHER: str(os.getpid()),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals_passed_on(ranks) as received:
        try:
            for rank in range(count):
                if received:
                    raise Interrupted(
                        "Interrupted before all processes had started.",
                        fix="Run the same command again.",
                        signal_number=received[0],
                    )
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(_start(command, {**shared, **own}, is_main=rank == 0))
            return _wait(ranks, received)
        finally:
            for process in ranks:
                _kill(process)
                process.wait()


def _start(
    command: Sequence[str], environment: dict[str, str], *, is_main: bool
) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own: Ctrl+C reaches it once, through this process."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if is_main else subprocess.DEVNULL,
        start_new_session=True,
    )


@contextlib.contextmanager
def _signals_passed_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals on to the processes, as torchrun does; yield the list of those received."""
    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        _signal_all(ranks, number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    """Wait for every process, and return the run's exit code; after a failure, end the rest."""
    failed: int | None = None
    kill_at_s = float("inf")
    while None in [process.poll() for process in ranks]:
        time.sleep(POLL_S)
        if failed is None:
            failed = _first_failed(ranks)
            if failed is not None:
                kill_at_s = time.monotonic() + KILL_AFTER_S
                if not received:
                    _signal_all(ranks, signal.SIGTERM)
        elif time.monotonic() > kill_at_s:
            for process in ranks:
                _kill(process)
    failed = _first_failed(ranks) if failed is None else failed
    if failed is None:
        return max(process.returncode for process in ranks)
    code = ranks[failed].returncode
    if code > 0 and (failed == 0 or received):
        return code
    raise _failure(failed, code)


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank that failed, of several at once one that could not say why."""
    failed = [rank for rank, process in enumerate(ranks) if not _is_orderly(process.returncode)]
    return min(failed, key=lambda rank: (ranks[rank].returncode > 0, rank), default=None)


def _is_orderly(code: int | None) -> bool:
    """Return whether a process is running, done, or stopped and saved."""
    return code in (None, 0, Stopped.exit_code)


def _failure(rank: int, code: int) -> RunFailed:
    if code > 0:
        error = RunFailed(
            f"Rank {rank} failed with exit code {code}, and the others were ended.",
            fix=f"See its message above; it starts with [rank {rank}].",
        )
        error.exit_code = code
        return error
    name = signal.Signals(-code).name
    return RunFailed(
        f"Rank {rank} was killed by {name}, and the others were ended.",
        fix="The usual cause is too little memory (see `dmesg`): lower batch.rows_per_device. The "
        "same command resumes."
        if name == "SIGKILL"
        else "See its messages above. The same command resumes.",
    )


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        process.send_signal(number)  # does nothing if the process has ended


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that is still running, with those that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
