"""Starts the processes of `train.devices` on this machine, and ends them together.

Each process is a rank: it runs the same command line, with the environment variables that torchrun
sets. Rank 0 has the terminal. Of the other ranks, only errors are shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from flatout.config.sections import ParallelConfig
from flatout.errors import (
    ConfigError,
    HardwareError,
    Interrupted,
    RunFailed,
    SmallerBatch,
    Stopped,
)
from flatout.hardware.machine import Machine, pick_device

LAUNCHER = "FLATOUT_LAUNCHER"
"""The environment variable with the id of the process that started a rank."""
POLL_S = 0.05
KILL_AFTER_S = 10.0
"""Seconds after the first failure until the other processes are killed: they may be waiting for the
failed one in an operation that no signal interrupts.
"""
STOP_WITHIN_S = 60.0
"""Seconds after a process has stopped with exit code 75 until the others are killed: they stop at
the same step, rank 0 after uploading checkpoints for up to 25 s. One that a watchdog ended leaves
behind the one that is stuck.
"""
SAME_REQUEST_S = 1.0
"""A SIGINT within this time repeats the first one: terminal and launcher may both send it."""
MAX_STARTS = 20
"""Each start has at most half the rows of the one before, so this many would begin with 2**20."""
MOST_PER_CORE = 4
"""Maximum processes per CPU core. More than one per core is only useful for a trial."""
QUIT_AFTER_S = 3.0
"""Seconds after a second SIGINT until the processes are killed."""


def stated_variables(names: Iterable[str]) -> dict[str, str]:
    """Return the environment variables among `names` that are set, with their values."""
    return {name: os.environ[name] for name in names if name in os.environ}


def own_environment() -> dict[str, str]:
    """Return a copy of this process's environment variables, for processes that it starts."""
    return dict(os.environ)


def num_processes(devices: int | str | None, device: str, machine: Machine) -> int:
    """Return how many processes `train.devices` asks for on this machine.

    `all` is one for each GPU that torch sees, and 1 on a CPU.
    Raises: ConfigError when `device` is a single GPU; HardwareError when there are too few GPUs, or
            far fewer cores, or as `pick_device`.
    """
    if devices is None or devices == 1:
        return 1
    if ":" in device:
        raise ConfigError(
            f"train.device={device} is one GPU, but train.devices={devices} asks for more.",
            fix="Set train.device=cuda, or remove train.devices.",
        )
    chosen, _ = pick_device(device, machine)
    if chosen == "cpu":
        count = 1 if devices == "all" else int(devices)
        if count > MOST_PER_CORE * machine.cores:
            raise HardwareError(
                f"train.devices={count} starts that many processes, but this machine has "
                f"{machine.cores} cores.",
                fix=f"Set train.devices={machine.cores} or less.",
            )
        return count
    import torch

    there = torch.cuda.device_count() if chosen != "mps" else 1
    count = there if devices == "all" else int(devices)
    if count > there:
        raise HardwareError(
            f"train.devices={devices} needs that many GPUs, but torch sees {there}.",
            fix="Set train.devices=all, or train.device=cpu.",
        )
    return count


def replicas(config: ParallelConfig, world_size: int) -> int:
    """Return the number of copies of the model in `world_size` processes.

    Raises: ConfigError when replicate times shard is not that number, or context is no divisor.
    """
    stated = f"parallel.shard={config.shard}"
    if config.tensor > 1:
        stated += f" x parallel.tensor={config.tensor}"
    each = config.shard * config.tensor
    replicate = max(1, world_size // each)
    if config.replicate != "auto":
        replicate = config.replicate
        stated = f"parallel.replicate={replicate} x {stated}"
    processes = replicate * each
    if processes == world_size:
        among, key = (config.shard, "shard") if config.shard > 1 else (replicate, "replicate")
        if among % config.context:
            raise ConfigError(
                f"parallel.context={config.context} does not divide parallel.{key}={among}: groups "
                "of that many processes share rows.",
                fix=f"Set parallel.context to a divisor of {among}, or remove it.",
            )
        return replicate
    launch = f"with `torchrun --nproc-per-node {processes} -m flatout ...`"
    fix = (
        f"Set train.devices={processes}, start {launch}, or remove parallel.replicate and "
        "parallel.shard."
        if world_size == 1
        else f"Set train.devices={each} or a multiple, or start {launch}."
        if config.tensor > 1
        else f"Set parallel.replicate=auto and parallel.shard to a divisor of {world_size}, "
        f"train.devices={processes}, or start {launch}."
    )
    noun = "process" if world_size == 1 else "processes"
    raise ConfigError(f"{stated} does not fit {world_size} {noun}.", fix=fix)


def program(words: Sequence[str]) -> list[str]:
    """Return a command that runs `flatout WORDS` with the import path of this process."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from flatout.__main__ import main; main()"
    return [sys.executable, "-c", code, *words]


def launch(command: Sequence[str], count: int, environment: Mapping[str, str], cores: int) -> int:
    """Run a command as `count` ranks, and return the exit code of the run.

    When one of them fails, the others are ended. When one has recorded a smaller micro-batch, all
    start again. Threads are limited to the rank's share of the `cores`, unless OMP_NUM_THREADS is
    set.
    Raises: RunFailed when a process other than rank 0 failed, or one was killed; Stopped when
            one did not end after the others had stopped; Interrupted when a signal ended them
            before they could save.
    """
    shared = {
        "OMP_NUM_THREADS": str(max(1, cores // count)),
        **environment,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        LAUNCHER: str(os.getpid()),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals_passed_on(ranks) as received:
        for start in range(1, MAX_STARTS + 1):
            with socket.create_server(("127.0.0.1", 0)) as free:
                shared["MASTER_PORT"] = str(free.getsockname()[1])
            try:
                for rank in range(count):
                    if received.numbers:
                        raise _interrupted(received.numbers[0])
                    process = subprocess.Popen(
                        command,
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL if rank else None,
                        start_new_session=True,  # Ctrl+C reaches it once, through this process
                    )
                    ranks.append(process)
                code = _wait(ranks, received)
            finally:
                for process in ranks:
                    _kill(process)
                    process.wait()
            if code != SmallerBatch.exit_code or received.numbers or start == MAX_STARTS:
                break
            ranks.clear()
        return code


@dataclass
class _Received:
    """The signals that arrived."""

    numbers: list[int] = field(default_factory=list)
    first_sigint_s: float | None = None
    quit_at_s: float = float("inf")
    """When to kill the processes, after a second SIGINT."""

    def note(self, number: int) -> None:
        now_s = time.monotonic()
        self.numbers.append(number)
        if number == signal.SIGINT:
            if self.first_sigint_s is None:
                self.first_sigint_s = now_s
            elif now_s - self.first_sigint_s >= SAME_REQUEST_S:
                self.quit_at_s = min(self.quit_at_s, now_s + QUIT_AFTER_S)

    def ended(self, code: int) -> bool:
        """Return whether a process with this exit code was ended by one of the signals."""
        quits = code == -signal.SIGKILL and self.quit_at_s < float("inf")
        return quits or any(code in (-number, 128 + number) for number in self.numbers)


@contextlib.contextmanager
def _signals_passed_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[_Received]:
    """Pass signals on to the processes, as torchrun does. Yield those received."""
    received = _Received()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.note(number)
        _signal_all(ranks, number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: _Received) -> int:
    """Wait for every process, and return the run's exit code. After a failure, end the rest."""
    failed: int | None = None
    kill_at_s = stop_by_s = float("inf")
    while None in (codes := [process.poll() for process in ranks]):
        time.sleep(POLL_S)
        if failed is None:
            failed = _first_failed(ranks)
            if failed is not None:
                kill_at_s = time.monotonic() + KILL_AFTER_S
                if not received.numbers:
                    _signal_all(ranks, signal.SIGTERM)
            elif Stopped.exit_code in codes:
                stop_by_s = min(stop_by_s, time.monotonic() + STOP_WITHIN_S)
        if time.monotonic() > min(kill_at_s, received.quit_at_s, stop_by_s):
            stuck = [rank for rank, process in enumerate(ranks) if _kill(process)]
            if stuck and failed is None and time.monotonic() > stop_by_s:
                raise Stopped(
                    f"Rank {stuck[0]} did not end within {STOP_WITHIN_S:.0f} s after another rank "
                    "had stopped, and was killed.",
                    fix="Run the same command again to continue.",
                )
    ended = [process.returncode for process in ranks]
    failed = _first_failed(ranks) if failed is None else failed
    return max(ended) if failed is None else _exit_code(ended, failed, received)


def _exit_code(codes: Sequence[int], failed: int, received: _Received) -> int:
    """Return the exit code of a run whose rank `failed` did not end well.

    Raises: as `launch`.
    """
    if SmallerBatch.exit_code in codes and not received.numbers:
        return SmallerBatch.exit_code
    main_code, code = codes[0], codes[failed]
    if received.ended(main_code):
        if main_code > 0:  # it has reported that
            return main_code
        raise _interrupted(received.numbers[-1] if main_code == -signal.SIGKILL else -main_code)
    if _is_orderly(main_code) and received.ended(code):
        return main_code  # the run was saved, and another rank was ended after that
    if code > 0:
        if failed == 0 or received.numbers:
            return code
        error = RunFailed(
            f"Rank {failed} failed with exit code {code}, and the others were ended.",
            fix=f"See its message above. It starts with [rank {failed}].",
        )
        error.exit_code = code
        raise error
    name = signal.Signals(-code).name
    raise RunFailed(
        f"Rank {failed} was killed by {name}, and the others were ended.",
        fix="The usual cause is too little memory (see `dmesg`): lower batch.rows_per_device. The "
        "same command resumes."
        if name == "SIGKILL"
        else "See its messages above. The same command resumes.",
    )


def _interrupted(number: int) -> Interrupted:
    return Interrupted(
        "Interrupted before the run could save.",
        fix="Run the same command again.",
        signal_number=number,
    )


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank that failed. Of several, it is one that could not report why."""
    failed = [rank for rank, process in enumerate(ranks) if not _is_orderly(process.returncode)]
    return min(failed, key=lambda rank: (ranks[rank].returncode > 0, rank), default=None)


def _is_orderly(code: int | None) -> bool:
    """Return whether a process is running, done, or stopped and saved."""
    return code in (None, 0, Stopped.exit_code)


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        process.send_signal(number)  # does nothing if the process has ended


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process with those that it started, and return whether it was still running."""
    is_running = process.poll() is None
    if is_running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return is_running
