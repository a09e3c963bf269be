"""Runs a trial in its own process; there is a result even if that dies, hangs or prints nonsense.

The trial builds and trains its run with the training code; it saves nothing, and writes only to a
scratch directory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress

from pydantic import ValidationError

from flatout.errors import FlatoutError, OutOfMemory
from flatout.measure.child import Answer, ask
from flatout.measure.trials.spec import Status, TrialResult, TrialSpec
from flatout.measure.trials.workload import measure

BINARY_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def run_trial(spec: TrialSpec, timeout_s: float, *, command: Sequence[str] = ()) -> TrialResult:
    """Measure in a fresh process, which is killed after `timeout_s`, and return a result."""
    start_s, found = time.monotonic(), list[TrialResult]()

    def on_answer(line: str) -> bool:
        with suppress(ValidationError):
            found.append(TrialResult.model_validate_json(line))
        return True

    ended = ask(f"{__name__}:answer", spec, on_answer, timeout_s=timeout_s, command=command)
    if ended.timed_out:
        status: Status = "timed-out"
        reason = f"It had not ended after {timeout_s:.0f} s."
    elif ended.signal is not None:
        status, why = "failed", ": the usual cause is too little memory"
        reason = f"The process was killed by {ended.signal}{why * (ended.signal == 'SIGKILL')}."
    else:
        status = "failed"
        reason = (
            f"The process ended with exit code {ended.code} and no result; its output: "
            f"{ended.last_words}"
        )
    if ended.timed_out or ended.signal or not found:
        found = [TrialResult(status=status, reason=reason)]
    return found[-1].model_copy(update={"process_s": time.monotonic() - start_s})


def answer(request: str, answer: Answer) -> None:
    """Answer a specification with a result."""
    answer(measured(TrialSpec.model_validate_json(request)))


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
