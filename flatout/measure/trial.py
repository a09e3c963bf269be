"""One measurement in a process of its own: what is compiled, cached or leaked there ends with it,
and so does its death.

`run_trial` starts a Python of its own that calls `main`, hands it a `TrialSpec` as JSON and reads a
`TrialResult` back. Whatever happens to the process, a result comes of it. The trial itself builds
its run with the functions that training uses and trains in their loop; it saves nothing, and writes
into a scratch folder alone.
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

from flatout.errors import FlatoutError
from flatout.measure.spec import Status, TrialResult, TrialSpec
from flatout.measure.workload import measure

KILL_PATIENCE_S = 5.0
PARENT_LOOK_S = 1.0
BINARY_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def run_trial(
    spec: TrialSpec, timeout_s: float, *, command: list[str] | None = None
) -> TrialResult:
    """Measure in a fresh process, and return what came of it, even if it was killed, hung, or
    printed nonsense.

    A process that goes on after `timeout_s` is killed, with all that it started. `command` replaces
    the program, for tests.
    """
    began_s = time.monotonic()
    # The new process finds what this one finds, wherever that was started from.
    program = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:] = {sys.path!r}; from flatout.measure.trial import main; main()",
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
            process_s=time.monotonic() - began_s,
        )
    finally:
        end_group(process)
    return read_result(process.returncode, out, err).model_copy(
        update={"process_s": time.monotonic() - began_s}
    )


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a process and of all that it started, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_PATIENCE_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with suppress(OSError):
                stream.close()


def read_result(code: int, out: str, err: str) -> TrialResult:
    """Return what a process that ended with `code` printed, or what its end means."""
    if code < 0:
        name = signal.Signals(-code).name
        why = ": most likely the system, because memory ran out" if name == "SIGKILL" else ""
        return TrialResult(status="failed", reason=f"The process was ended by {name}{why}.")
    lines = out.strip().splitlines()
    with suppress(ValidationError, IndexError):
        return TrialResult.model_validate_json(lines[-1])
    said = (err.strip().splitlines() or lines or ["nothing"])[-1][:300]
    return TrialResult(
        status="failed",
        reason=f"The process ended with exit code {code} and no result; it said: {said}",
    )


def main() -> None:
    """Read a spec from standard input, measure, print the result. Whatever else prints goes to
    standard error.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    spec = TrialSpec.model_validate_json(sys.stdin.read())
    results.write(measured(spec).model_dump_json() + "\n")
    results.flush()


def end_with(parent: int) -> None:
    """End this process and all that it started once its parent has: a killed bench leaves nothing
    behind.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    os.killpg(0, signal.SIGKILL)


def measured(spec: TrialSpec) -> TrialResult:
    """Carry the trial out here; an error becomes its result."""
    try:
        return measure(spec)
    except FlatoutError as error:
        status: Status = "out-of-memory" if str(error).startswith("Out of memory") else "failed"
        return TrialResult(status=status, reason=error.what)
    except MemoryError:
        return TrialResult(
            status="out-of-memory", reason="Out of memory: the machine had no more to give."
        )
    except (
        Exception
    ) as error:  # the process is about to end: what went wrong, whatever it is, is the row
        first_line = (str(error).splitlines() or [""])[0][:300]
        if "can't allocate memory" in str(error):
            return TrialResult(
                status="out-of-memory",
                reason=f"Out of memory: {asked_for(str(error)) or first_line}",
            )
        return TrialResult(status="failed", reason=f"{type(error).__name__}: {first_line}")


def asked_for(said: str) -> str | None:
    """Return what an allocator's message says that it was asked for; None when it names no bytes."""
    found = re.search(r"(\d+) bytes", said)
    if found is None:
        return None
    size, power = float(found[1]), 0
    while size >= 1024 and power < len(BINARY_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"it tried to take {size:.{1 if power else 0}f} {BINARY_UNITS[power]}."
