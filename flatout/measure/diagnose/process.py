"""Starts the measured run of `diagnose` in a process of its own, and reads its evidence. No torch.

The process prints one line of evidence before the first step, and one after the last. Whatever
happens to it, there is evidence: a process that is killed, hangs or prints nonsense is a finding.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError

from flatout import errors
from flatout.errors import RunFailed
from flatout.json_io import Stored
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.steps.evidence import Evidence, Failure

PROGRAM = "from flatout.measure.diagnose.run import main; main()"
GRACE_S = 120.0
"""Time for the start of the process and its preflight, on top of the spec's limit."""
KILL_TIMEOUT_S = 5.0


class Refusal(Stored):
    """The line with which the process reports a configuration that cannot be resolved."""

    refused: str
    """Name of the error's class in flatout/errors.py."""
    what: str
    """What is wrong."""
    fix: str
    """What to do about it."""


def measure_apart(
    spec: MeasureSpec,
    on_preflight: Callable[[Evidence], bool] = lambda _: True,
    *,
    command: list[str] | None = None,
) -> Evidence:
    """Return the evidence of a measured run in a fresh process.

    `on_preflight` receives what is known before the first step, and returns whether to take any.
    `command` replaces the program, for tests.
    Raises: UsageError when the configuration cannot be resolved; RunFailed when the process died
            before it knew anything.
    """
    program = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {PROGRAM}"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            command or program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        late = threading.Timer(spec.limit_s + GRACE_S, _kill, [process])
        late.start()
        try:
            lines = _lines(process, spec, on_preflight)
            with suppress(subprocess.TimeoutExpired):  # a process that has ended has its exit code
                process.wait(KILL_TIMEOUT_S if len(lines) < 2 else 0)
        finally:
            timed_out, code = late.finished.is_set(), process.poll()
            late.cancel()
            _kill(process)
            process.wait(KILL_TIMEOUT_S)
            if process.stdout is not None:
                process.stdout.close()
        complaints.seek(0)
        last_words = (complaints.read().strip().splitlines() or ["nothing"])[-1][:300]
    return _read(lines, code, last_words, timed_out=timed_out)


def _lines(
    process: subprocess.Popen[str], spec: MeasureSpec, on_preflight: Callable[[Evidence], bool]
) -> list[Evidence]:
    """Return the evidence that the process prints, until it ends or nothing more is wanted."""
    assert process.stdin is not None
    assert process.stdout is not None
    found: list[Evidence] = []
    with suppress(BrokenPipeError), process.stdin as asked:  # of a process that has ended
        asked.write(spec.model_dump_json())
    for line in process.stdout:
        with suppress(ValidationError):
            error = Refusal.model_validate_json(line)
            raise getattr(errors, error.refused)(error.what, fix=error.fix)
        try:
            found.append(Evidence.model_validate_json(line))
        except ValidationError:
            continue
        if len(found) == 1 and not on_preflight(found[0]):
            return [*found, found[0]]
        if len(found) == 2:
            break
    return found


def _read(found: list[Evidence], code: int | None, last_words: str, *, timed_out: bool) -> Evidence:
    """Return the last evidence of a process, or why there is none.

    `code` is its exit code, None if it had to be killed.
    """
    if len(found) == 2:
        return found[1]
    if timed_out:
        failure = Failure(kind="hang", message="The run had not ended in time.")
    elif code == -signal.SIGKILL:
        failure = Failure(
            kind="killed",
            message="The process was killed by SIGKILL: the usual cause is too little memory.",
        )
    elif code is not None and code < 0:
        name = signal.Signals(-code).name
        failure = Failure(kind="error", message=f"The process was killed by {name}: {last_words}")
    elif code is None:
        failure = Failure(kind="error", message=f"The process gave no result: {last_words}")
    else:
        failure = Failure(
            kind="error", message=f"The process ended with exit code {code}: {last_words}"
        )
    if not found:
        raise RunFailed(
            f"Nothing could be measured. {failure.message}",
            fix="Try the same recipe with `flatout train`.",
        )
    return found[0].model_copy(update={"source": "measured run", "failure": failure})


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
