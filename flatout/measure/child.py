"""Measures in a separate process, so that nothing that it compiles, caches or leaks outlives it.

`ask` starts a Python process that calls a function of flatout, sends it a request as JSON, and
receives its answers, one line of JSON each. Whatever happens to the process, there is an `Ended`
that reports how it ended. An error of ours is raised here as it was there. No torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from flatout import errors
from flatout.errors import FlatoutError, RunFailed, UsageError
from flatout.storage.files import Stored

KILL_TIMEOUT_S = 5.0
PARENT_POLL_S = 1.0
Answer = Callable[[Stored], None]
"""Sends one answer to the process that asked."""


class Told(Stored):
    """An error of flatout, as it passes between processes."""

    error: str
    """Name of its class in flatout/errors.py."""
    what: str
    """What is wrong."""
    fix: str
    """What to do about it."""

    @classmethod
    def of(cls, error: FlatoutError) -> Told:
        """Return an error in the form in which it passes."""
        return cls(error=errors.kind_of(error), what=error.what, fix=error.fix)

    def raised(self) -> FlatoutError:
        """Return the error, to be raised here. Any other than a usage error means a failed run."""
        kind: type[FlatoutError] = getattr(errors, self.error, RunFailed)
        is_usage = issubclass(kind, UsageError)
        return (kind if is_usage else RunFailed)(self.what, fix=self.fix)


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Its exit code, negative for a signal. None if it had to be killed."""
    timed_out: bool
    last_words: str
    """The last line of its output to standard error."""

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, such as SIGKILL. None for none."""
        return None if self.code is None or self.code >= 0 else signal.Signals(-self.code).name


def python(program: str, *arguments: str) -> list[str]:
    """Return the command of a fresh Python with this one's import path, wherever it was started."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}", *arguments]


def ask(
    function: str,
    request: Stored,
    on_answer: Callable[[str], bool],
    *,
    timeout_s: float | None = None,
    command: Sequence[str] = (),
) -> Ended:
    """Call `package.module:function` with a request in a fresh process, until it ends.

    `on_answer` receives each line that it prints, and returns whether to wait for more. After
    `timeout_s` the process is killed, with everything that it started. `command` replaces the
    default command, for tests.
    Raises: the error of flatout that the function raised.
    """
    program = f"from flatout.measure.child import main; main({function!r})"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            [*command] or python(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            end_group(process)

        late = threading.Timer(timeout_s or threading.TIMEOUT_MAX, kill)
        late.daemon = True
        late.start()
        is_satisfied = False
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as asked:  # of one that has ended
                asked.write(request.model_dump_json())
            for line in process.stdout:
                with suppress(ValidationError):
                    raise Told.model_validate_json(line).raised()
                if is_satisfied := not on_answer(line):
                    break
            with suppress(subprocess.TimeoutExpired):  # one that has ended has its exit code
                process.wait(0 if is_satisfied else KILL_TIMEOUT_S)
        finally:
            timed_out, code = is_late.is_set(), process.poll()
            late.cancel()
            end_group(process)
            process.stdout.close()
        complaints.seek(0)
        last_words = (complaints.read().strip().splitlines() or ["nothing"])[-1][:300]
    return Ended(code, timed_out, last_words)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a process and everything it started, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)


def main(function: str) -> None:
    """Answer the request on standard input by `package.module:function(request, answer)`.

    Standard output is for the answers. Everything else goes to standard error.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")

    def answer(found: Stored) -> None:
        results.write(found.model_dump_json() + "\n")
        results.flush()

    start_child()
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(sys.stdin.read(), answer)
    except FlatoutError as error:
        answer(Told.of(error))
        raise SystemExit(error.exit_code) from None


def start_child() -> None:
    """Send this process's output to standard error, and end it when its parent ends.

    A killed bench therefore leaves nothing running.
    """
    os.dup2(2, 1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()


def end_with(parent: int) -> None:
    """End this process, and everything it started, when its parent ends."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)
