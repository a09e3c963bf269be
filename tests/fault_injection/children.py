"""Commands of flatout in child processes that a test can kill, stop and trace."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
LIMIT_S = 120.0
"""Longest time that a command may take; a longer one hangs."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code, negative for a signal."""
    out: str
    err: str

    @property
    def result(self) -> dict:
        """The JSON object of `--json`."""
        return json.loads(self.out.splitlines()[-1])


class Child:
    """One command that runs."""

    def __init__(self, children: Children, pid: int, output: Path) -> None:
        self._children, self.pid, self._output = children, pid, output

    def runs(self) -> bool:
        """Return whether it has not ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def send(self, number: int) -> None:
        """Send a signal. A child that has ended ignores it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> Ended:
        """Kill it, and return how it ended: it may have been done."""
        self.send(signal.SIGKILL)
        return self.wait()

    def wait(self, seconds: float = LIMIT_S) -> Ended:
        """Wait for its end.

        Raises: TimeoutError after `seconds`; the command is killed.
        """
        code = self._children.ask({"wait": self.pid, "seconds": seconds})
        if code is None:
            self.send(signal.SIGKILL)
            self._children.ask({"wait": self.pid, "seconds": seconds})
        out, err = (
            Path(f"{self._output}.{name}").read_text(errors="replace") for name in ("out", "err")
        )
        if code is None:
            raise TimeoutError(f"still running after {seconds:.0f} s: {err[-2000:]}")
        return Ended(code, out, err)


class Children:
    """Starts commands in forks of one process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        """Start that process."""
        self._folder = folder
        self._numbers = itertools.count()
        self.scratch = folder / "scratch"
        """Directory of their temporary files."""
        self.scratch.mkdir()
        environment = {
            **os.environ,
            "TMPDIR": str(self.scratch),
            "PYTHONPATH": str(HERE.parent.parent),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        words = [sys.executable, "-W", "ignore", str(HERE / "warm_process.py")]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def warm_up(self, *words) -> None:
        """Run a command in that process, so that it has imported what the command needs."""
        failed = self.ask({"here": [str(word) for word in words]})
        assert failed is None, failed

    def ask(self, request: dict):
        """Return the answer to a request."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self, *words, stopped: bool = False, environment: dict[str, str] | None = None
    ) -> Child:
        """Start a command; `stopped` before its first line, for a tracer, until SIGCONT."""
        output = self._folder / f"command-{next(self._numbers)}"
        pid = self.ask(
            {
                "start": [str(word) for word in words],
                "output": str(output),
                "environment": environment or {},
                "stopped": stopped,
            }
        )
        return Child(self, pid, output)

    def run(self, *words, environment: dict[str, str] | None = None) -> Ended:
        """Run a command to its end."""
        return self.start(*words, environment=environment).wait()

    def close(self) -> None:
        """End the process and what it started."""
        started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.communicate()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_until(true, *, child: Child, seconds: float = LIMIT_S, every_s: float = 0.001) -> bool:
    """Wait until `true()` holds, and return whether it does while the child runs."""
    give_up = time.monotonic() + seconds
    while not true():
        if not child.runs() or time.monotonic() > give_up:
            return False
        time.sleep(every_s)
    return True
