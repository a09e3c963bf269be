"""Measures a recipe, or reads a run, and returns the evidence. No torch.

A recipe runs in a separate process, which answers with evidence before the first step, and again
after the last. Whatever happens to it, there is evidence: a process that is killed, hangs or prints
nonsense is a finding.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from flatout.config.schema import RunConfig
from flatout.errors import RunFailed
from flatout.measure.child import ask
from flatout.measure.diagnose.alternatives import with_alternatives
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.spec import DEFAULT_SECONDS, LIMIT_S, MeasureSpec
from flatout.measure.steps.evidence import Evidence, Failure
from flatout.progress import SILENT, Progress
from flatout.training.metrics.observers import Observer

GRACE_S = 120.0
"""Time for the start of the process and its preflight, on top of the spec's limit."""


def diagnose_recipe(
    config: RunConfig,
    *,
    seconds: float = DEFAULT_SECONDS,
    cache: Path | None = None,
    callbacks: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> Evidence:
    """Check a configuration on this machine, run it for some seconds, and return the evidence.

    No step is taken when something already known keeps the run from starting. The run has a
    separate process, unless there are callbacks, which only exist in this one. What may be faster
    on a CPU is tried after it, for at most four times `seconds` and the starts of its processes.
    Raises: UsageError when the configuration cannot be resolved; RunFailed.
    """

    def on_preflight(evidence: Evidence) -> bool:
        stops = any(finding.harm == "fails" for finding in diagnosis_of(evidence).findings)
        if not stops:
            progress.say("Nothing keeps the run from starting. Measuring its steps.")
        return not stops

    with measurement_of(config, seconds, cache=cache and str(cache)) as spec:
        with progress.task("Measuring (about half a minute)"):
            if not callbacks:
                found = measure_apart(spec, on_preflight)
            else:
                from flatout.measure.diagnose.preflight import prepare
                from flatout.measure.diagnose.run import measured

                prepared = prepare(spec)
                found = prepared.evidence
                if on_preflight(found) and prepared.resolved is not None:
                    found = measured(spec, prepared, callbacks)
        return with_alternatives(found, spec, progress)


@contextmanager
def measurement_of(config: RunConfig, seconds: float, **more: Any) -> Iterator[MeasureSpec]:
    """Make a directory on the disk of the run's checkpoints, and remove it at the end."""
    root = Path(config.checkpoint.dir or "runs")
    while not root.is_dir():
        root = root.parent
    folder = Path(tempfile.mkdtemp(prefix=".diagnose-", dir=root))
    try:
        yield MeasureSpec(
            config=config.to_dict(),
            folder=str(folder / "run"),
            seconds=seconds,
            limit_s=LIMIT_S + 6 * seconds,
            **more,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_apart(
    spec: MeasureSpec,
    on_preflight: Callable[[Evidence], bool] = lambda _: True,
    *,
    command: Sequence[str] = (),
) -> Evidence:
    """Return the evidence of a measured run in a fresh process.

    `on_preflight` receives what is known before the first step, and returns whether to take any.
    `command` replaces the default command, for tests.
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

    function = "flatout.measure.diagnose.run:collect"
    ended = ask(function, spec, on_answer, timeout_s=spec.limit_s + GRACE_S, command=command)
    if len(found) > 1:
        return found[1]
    kind: Literal["hang", "killed", "error"] = "error"
    if ended.timed_out:
        kind, message = "hang", "The run did not end in time."
    elif ended.signal == "SIGKILL":
        kind = "killed"
        message = "The process was killed by SIGKILL: the usual cause is too little memory."
    else:
        how = f"ended with exit code {ended.code}"
        if ended.signal is not None:
            how = f"was killed by {ended.signal}"
        elif ended.code is None:
            how = "gave no result"
        message = f"The process {how}: {ended.last_words}"
    if not found:
        raise RunFailed(
            f"Nothing could be measured. {message}", fix="Try the same recipe with `flatout train`."
        )
    failure = Failure(kind=kind, message=message)
    return found[0].model_copy(update={"source": "measured run", "failure": failure})
