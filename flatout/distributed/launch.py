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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

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
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that are passed on to the ranks."""
POLL_S = 0.05
PATIENCE_S, QUIT_S = 30.0, 3.0
"""Seconds until the ranks that still run are killed: after the first one that failed or stopped
(they may wait for it in an operation that no signal interrupts, or upload checkpoints for up to
25 s), and after a second SIGINT.
"""
SAME_REQUEST_S = 1.0
"""A SIGINT within this time repeats the first one: terminal and launcher may both send it."""
MAX_STARTS = 20
"""Each start has at most half the rows of the one before, so this many would begin with 2**20."""
MOST_PER_CORE = 4
"""Maximum processes per CPU core. More than one per core is only useful for a trial."""


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
    run, code = _Run(), SmallerBatch.exit_code
    before = {number: signal.signal(number, run.pass_on) for number in SIGNALS}
    try:
        for _ in range(MAX_STARTS):
            if code == SmallerBatch.exit_code and not run.received:
                code = run.start(command, shared, count)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


@dataclass
class _Run:
    """The ranks of a run, and the signals that arrived."""

    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    sigint_s: float = float("inf")
    """When the first SIGINT arrived."""
    kill_at_s: float = float("inf")

    def start(self, command: Sequence[str], environment: Mapping[str, str], count: int) -> int:
        """Run all ranks to their end, and return the exit code of the run. Raises: as `launch`."""
        self.ranks, self.kill_at_s = [], float("inf")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        try:
            for rank in range(count):
                if self.received:
                    raise _interrupted(self.received[0])
                own = {"MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(
                    command,
                    env={**environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if rank else None,
                    start_new_session=True,  # Ctrl+C reaches it once, through this process
                )
                self.ranks.append(process)
            return self._wait()
        finally:
            for process in self.ranks:
                _kill(process)
                process.wait()

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Pass a signal on to the ranks, as torchrun does."""
        self.received.append(number)
        if number == signal.SIGINT:
            now_s = time.monotonic()
            if now_s - self.sigint_s >= SAME_REQUEST_S:
                self.kill_at_s = min(self.kill_at_s, now_s + QUIT_S)
            self.sigint_s = min(self.sigint_s, now_s)
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self.ranks:
            process.send_signal(number)  # does nothing if the process has ended

    def _wait(self) -> int:
        """Wait for all ranks, and return the exit code of the run. Raises: as `launch`.

        The first that fails or stops ends the others, and its code is the run's, unless a signal
        came before: then it is that of rank 0.
        """
        first: int | None = None
        while True:
            codes = [process.poll() for process in self.ranks]
            ended = {rank: code for rank, code in enumerate(codes) if code}
            if ended and first is None:
                first = min(ended, key=lambda rank: (ended[rank] > 0, rank))  # killed ones first
                self.kill_at_s = min(self.kill_at_s, time.monotonic() + PATIENCE_S)
                if not self.received and ended[first] != Stopped.exit_code:
                    self._send(signal.SIGTERM)
            if None not in codes:
                break
            if time.monotonic() > self.kill_at_s:
                for process in self.ranks:
                    _kill(process)
            time.sleep(POLL_S)
        if self.received:
            if ended.get(0, 0) < 0:
                raise _interrupted(self.received[-1])
            return ended.get(0, 0)
        if first is None or SmallerBatch.exit_code in codes:
            return SmallerBatch.exit_code if ended else 0
        code = ended[first]
        if code == Stopped.exit_code or first == 0 < code:
            return code
        how = f"failed with exit code {code}"
        fix = f"See its message above. It starts with [rank {first}]."
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            fix = "See its messages above. The same command resumes."
        if code == -signal.SIGKILL:
            fix = (
                "The usual cause is too little memory (see `dmesg`): lower batch.rows_per_device. "
                "The same command resumes."
            )
        error = RunFailed(f"Rank {first} {how}, and the others were ended.", fix=fix)
        error.exit_code = max(code, RunFailed.exit_code)
        raise error


def _interrupted(number: int) -> Interrupted:
    return Interrupted(
        "Interrupted before the run could save.",
        fix="Run the same command again.",
        signal_number=number,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with those that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
