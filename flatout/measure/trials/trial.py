"""Runs a measurement in its own process, so that nothing it compiles, caches or leaks outlives it.

`run_trial` starts a Python process that calls `main`, sends it a `TrialSpec` as JSON and reads a
`TrialResult` back; there is a result even if the process dies. The trial builds and trains its run
with the training code; it saves nothing, and writes only to a scratch directory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from pydantic import ValidationError

from flatout.errors import FlatoutError, OutOfMemory
from flatout.measure.trials.spec import Status, TrialResult, TrialSpec
from flatout.measure.trials.workload import measure

KILL_TIMEOUT_S = 5.0
PARENT_POLL_S = 1.0
BINARY_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def run_trial(
    spec: TrialSpec, timeout_s: float, *, command: list[str] | None = None
) -> TrialResult:
    """Measure in a fresh process, and return a result even if it dies, hangs or prints nonsense.

    After `timeout_s` the process is killed, with everything it started. `command` replaces the
    program, for tests.
    """
    start_s = time.monotonic()
    # the new process has the same import path, wherever this one was started
    program = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:] = {sys.path!r};"
        " from flatout.measure.trials.trial import main; main()",
    ]
    process = subprocess.Popen(
        command or program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        out, err = process.communicate(spec.model_dump_json(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return TrialResult(
            status="timed-out",
            reason=f"It had not ended after {timeout_s:.0f} s.",
            process_s=time.monotonic() - start_s,
        )
    finally:
        end_group(process)
    return read_result(process.returncode, out, err).model_copy(
        update={"process_s": time.monotonic() - start_s}
    )


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a process and everything it started, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with suppress(OSError):
                stream.close()


def read_result(code: int, out: str, err: str) -> TrialResult:
    """Return the result that a process printed, or one that explains its exit code."""
    if code < 0:
        name = signal.Signals(-code).name
        why = ": the usual cause is too little memory" if name == "SIGKILL" else ""
        return TrialResult(status="failed", reason=f"The process was killed by {name}{why}.")
    lines = out.strip().splitlines()
    with suppress(ValidationError, IndexError):
        return TrialResult.model_validate_json(lines[-1])
    last_line = (err.strip().splitlines() or lines or ["nothing"])[-1][:300]
    return TrialResult(
        status="failed",
        reason=f"The process ended with exit code {code} and no result; its output: {last_line}",
    )


def main() -> None:
    """Read a spec from standard input, measure, and print the result.

    All other output goes to standard error.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    spec = TrialSpec.model_validate_json(sys.stdin.read())
    results.write(measured(spec).model_dump_json() + "\n")
    results.flush()


def end_with(parent: int) -> None:
    """End this process, and everything it started, when its parent ends.

    A killed bench therefore leaves nothing running.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def measured(spec: TrialSpec) -> TrialResult:
    """Measure in this process; return an error as a result."""
    try:
        return measure(spec)
    except FlatoutError as error:
        status: Status = "out-of-memory" if isinstance(error, OutOfMemory) else "failed"
        return TrialResult(status=status, reason=error.what)
    except MemoryError:
        return TrialResult(status="out-of-memory", reason="Out of memory: the machine has no more.")
    except Exception as error:  # any failure becomes a row of the table
        first_line = (str(error).splitlines() or [""])[0][:300]
        # torch raises a plain RuntimeError when the CPU's memory is exhausted
        if "can't allocate memory" in str(error):
            return TrialResult(
                status="out-of-memory",
                reason=f"Out of memory: {asked_for(str(error)) or first_line}",
            )
        return TrialResult(status="failed", reason=f"{type(error).__name__}: {first_line}")


def asked_for(message: str) -> str | None:
    """Return the size that an allocator's message states, None when it states none."""
    found = re.search(r"(\d+) bytes", message)
    if found is None:
        return None
    size, power = float(found[1]), 0
    while size >= 1024 and power < len(BINARY_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"it tried to allocate {size:.{1 if power else 0}f} {BINARY_UNITS[power]}."
