"""Runs a training script with flatout attached, and returns what was found. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.errors import ConfigError, RunFailed
from flatout.measure.attach.request import Request
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.evidence import Evidence
from flatout.measure.trial import NOT_IMPORTED, Result, run_command, waiting_beside_others
from flatout.progress import SILENT, Progress


def diagnose_script(
    command: Sequence[str],
    request: Request,
    *,
    as_json: bool = False,
    progress: Progress = SILENT,
) -> tuple[Diagnosis, int | None]:
    """Measure a training script without an edit, and return the findings and its exit code.

    The code is None for a script that was ended.

    Raises: ConfigError when the command does not exist, or its environment has no flatout;
            RunFailed when nothing was measured.
    """
    environment = waiting_beside_others(progress)
    ran = run_command(command, request, as_json=as_json, environment=environment)
    found = diagnosis_of(evidence_in(" ".join(command), ran))
    return found, None if ran.is_complete and not request.to_the_end else ran.code


def evidence_in(name: str, ran: Result) -> Evidence:
    """Return what was measured of a script, with its failure.

    Raises: ConfigError when its environment has no flatout; RunFailed when nothing was measured.
    """
    evidence, problem, failure = ran.evidence, ran.problem, ran.failure
    if evidence is not None and failure is not None:
        evidence = evidence.model_copy(update={"failure": failure})
    if evidence is not None and (evidence.failure is not None or evidence.step_s is not None):
        return evidence
    if problem not in (None, NOT_IMPORTED) and not ran.steps:
        words, _, advice = str(problem).partition(" Fix: ")
        raise ConfigError(words, fix=advice or "Run flatout in the environment of the script.")
    fix = (
        "Let it train for at least 30 steps. A step is one of an optimizer of torch.optim after a "
        "backward pass, in the process that is started or one of its children."
    )
    if not ran.has_ended:
        fix = "Allow more --minutes, or make its steps shorter: fewer rows show the same."
    elif failure is not None:
        fix = failure.fix or "Run it alone first, and repair that."
    elif problem == NOT_IMPORTED:
        fix = "Name the command that trains. It must not start Python with -I, -E or -S."
    said = f" (exit code {ran.code})" if ran.output and ran.code else ""
    error = RunFailed(f"`{name}` cannot be measured{said}: {ran.reason}.", fix=fix)
    if code := ran.code:
        error.exit_code = code if code > 0 else 128 - code  # as a shell reports a signal
    raise error
