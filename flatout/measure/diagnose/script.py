"""Runs a training script with flatout attached, and returns what was found. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.errors import ConfigError, RunFailed
from flatout.measure.attach.request import Answer, Request
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.evidence import Evidence, Failure
from flatout.measure.trial import NOT_IMPORTED, run_command
from flatout.progress import SILENT, Progress, counted


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
    ran = run_command(command, request, as_json=as_json, progress=progress)
    found = diagnosis_of(evidence_in(" ".join(command), ran.answer, ran.code))
    return found, None if ran.answer.is_complete and not request.to_the_end else ran.code


def evidence_in(name: str, answer: Answer, code: int | None) -> Evidence:
    """Return what was measured of a script, with its failure.

    Raises: ConfigError when its environment has no flatout; RunFailed when nothing was measured.
    """
    evidence, failed = answer.evidence, code is not None and code > 0
    if evidence is not None and answer.failure is not None:
        evidence = evidence.model_copy(update={"failure": answer.failure})
    ended = f"ended with exit code {code}" if code is not None else "was ended"
    if evidence is not None and evidence.failure is None and failed:
        # it did not raise: sys.exit, os._exit, or another rank
        failure = Failure(kind="error", message=f"{name} {ended}", step=answer.steps)
        return evidence.model_copy(update={"failure": failure})
    if evidence is not None and (evidence.failure is not None or evidence.step_s is not None):
        return evidence
    if evidence is not None:
        what = f"ended after {counted(answer.steps, 'step')}, which are too few to measure."
        fix = "Let it train for at least 30 steps."
    elif answer.failure is not None:
        what = f"failed before its steps could be measured: {answer.failure.message}"
        fix = answer.failure.fix or "Repair that first."
    elif answer.problem not in (None, NOT_IMPORTED) and not answer.steps:
        words, _, advice = str(answer.problem).partition(" Fix: ")
        raise ConfigError(words, fix=advice or "Run flatout in the environment of the script.")
    elif code is not None and code < 0:
        what = f"was killed by signal {-code}, and nothing could be measured."
        fix = "Signal 9 is what the system sends when memory runs out: use a smaller batch."
    elif code is None and answer.problem is None:
        took = counted(answer.steps, "step") if answer.steps else "no step"
        what = f"took {took} until its time was up, which is too little to measure."
        fix = "Allow more --minutes, or make its steps shorter: fewer rows show the same."
    elif failed:
        what = f"{ended} before its first step was over. Its own error is above."
        fix = "Run it alone first, and repair that."
    elif answer.steps and answer.problem:
        what = f"took {answer.steps} steps, but they cannot be evaluated: {answer.problem}"
        fix = "Please report this, with the script."
    elif answer.problem == NOT_IMPORTED:
        what = f"{ended} and did not import torch."
        fix = "Name the command that trains. It must not start Python with -I, -E or -S."
    else:
        what = f"{ended}, but no optimizer of torch took two steps in it."
        fix = (
            "Let it train for more steps. A step is one of an optimizer of torch.optim after a "
            "backward pass, in the process that is started or one of its children."
        )
    error = RunFailed(f"`{name}` {what}", fix=fix)
    if code:
        error.exit_code = code if code > 0 else 128 - code  # as a shell reports a signal
    raise error
