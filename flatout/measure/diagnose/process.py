"""Starts the measured run of `diagnose` in a process of its own, and reads its evidence. No torch.

The process answers with evidence before the first step, and again after the last. Whatever happens
to it, there is evidence: a process that is killed, hangs or prints nonsense is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from pydantic import ValidationError

from flatout.errors import RunFailed
from flatout.measure.child import ask
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.steps.evidence import Evidence, Failure

GRACE_S = 120.0
"""Time for the start of the process and its preflight, on top of the spec's limit."""


def measure_apart(
    spec: MeasureSpec,
    on_preflight: Callable[[Evidence], bool] = lambda _: True,
    *,
    command: Sequence[str] = (),
) -> Evidence:
    """Return the evidence of a measured run in a fresh process.

    `on_preflight` receives what is known before the first step, and returns whether to take any.
    `command` replaces the program, for tests.
    Raises: UsageError when the configuration cannot be resolved; RunFailed when the process died
            before it knew anything.
    """
    found: list[Evidence] = []

    def on_answer(line: str) -> bool:
        with suppress(ValidationError):
            found.append(Evidence.model_validate_json(line))
            if len(found) == 1 and not on_preflight(found[0]):
                found.append(found[0])
        return len(found) < 2

    ended = ask(
        "flatout.measure.diagnose.run:collect",
        spec,
        on_answer,
        timeout_s=spec.limit_s + GRACE_S,
        command=command,
    )
    if len(found) > 1:
        return found[1]
    kind: Literal["hang", "killed", "error"] = "error"
    if ended.timed_out:
        kind, message = "hang", "The run had not ended in time."
    elif ended.signal == "SIGKILL":
        kind = "killed"
        message = "The process was killed by SIGKILL: the usual cause is too little memory."
    elif ended.signal is not None:
        message = f"The process was killed by {ended.signal}: {ended.last_words}"
    elif ended.code is None:
        message = f"The process gave no result: {ended.last_words}"
    else:
        message = f"The process ended with exit code {ended.code}: {ended.last_words}"
    if not found:
        raise RunFailed(
            f"Nothing could be measured. {message}", fix="Try the same recipe with `flatout train`."
        )
    failure = Failure(kind=kind, message=message)
    return found[0].model_copy(update={"source": "measured run", "failure": failure})
