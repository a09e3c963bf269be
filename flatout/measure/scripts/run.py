"""Runs a training script with flatout attached, and returns what was found. No torch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from pydantic import ValidationError

from flatout.distributed.launch import own_environment
from flatout.errors import ConfigError, RunFailed, in_shell
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.scripts.changes import CHANGES
from flatout.measure.scripts.request import SEEN, Answer, Request
from flatout.measure.steps.evidence import Evidence, Failure
from flatout.progress import SILENT, Progress, counted

POLL_S = 0.1
GRACE_S = 20.0
"""How long a script may take to end after it was measured."""
SLOW_START_S = 60.0
"""Time without a step after which the command reports that."""
REQUEST = "FLATOUT_ATTACH"
"""The environment variable by which a process finds what is asked of it."""
NOT_IMPORTED = "torch was not imported"
HOOK = Path(__file__).with_name("sitecustomize.py")


class Ran(NamedTuple):
    """How a script ended."""

    answer: Answer
    code: int | None
    """Exit code, negative for a signal that ended it. None means it was ended from here."""
    output: str
    """What it printed, if that was captured."""


def run_script(
    command: Sequence[str],
    request: Request,
    *,
    folder: Path | None = None,
    as_json: bool = False,
    limit_s: float = math.inf,
    progress: Progress = SILENT,
) -> Ran:
    """Run a script until it answers a request, and return the answer.

    Its code and its directory are not changed, and of its environment only what its changes set.
    Standard input and output are its own. With `as_json` its output goes to standard error. In a
    different `folder` there is no input, and the output is captured. After `limit_s` it is ended.
    Nothing that it started runs on, however the call ends.
    Raises: ConfigError when the command does not exist.
    """
    words = [*command]
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"There is no command {words[0]!r}.",
            fix="Write the command as in a terminal: flatout diagnose -- python train.py. A "
            f"pipeline needs a shell: -- sh -c {in_shell(' '.join(words))}.",
        )
    with tempfile.TemporaryDirectory(prefix="flatout-") as name, tempfile.TemporaryFile() as kept:
        own = Path(name)
        shutil.copyfile(HOOK, own / "sitecustomize.py")
        path, place = own / "answer.json", str(own / "request.json")
        request = request.model_copy(update={"answer": str(path)})
        Path(place).write_text(request.model_dump_json(), encoding="utf-8")
        before = own_environment() | ({"PYTHONHASHSEED": "0"} if request.timing else {})
        for change in request.changes:
            before |= CHANGES[change].edit.environment
        search = os.pathsep.join([name, *filter(None, [before.get("PYTHONPATH")])])
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**before, "PYTHONPATH": search, REQUEST: place},
            stdin=subprocess.DEVNULL if folder else None,
            stdout=kept if folder else sys.stderr if as_json else None,
            stderr=subprocess.STDOUT if folder else None,
        )
        try:
            _wait(process, request, place, limit_s, progress)
            code = process.poll()
        finally:
            end_all(process, place)
        try:
            answer = Answer.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            seen = _seen(request)
            steps = int((seen or "").partition(" ")[2] or 0)
            answer = Answer(problem=NOT_IMPORTED if seen is None else None, steps=steps)
        kept.seek(0)
        return Ran(answer, code, kept.read().decode(errors="replace").strip())


def _wait(
    process: subprocess.Popen[bytes],
    request: Request,
    place: str,
    limit_s: float,
    progress: Progress,
) -> None:
    """Wait until the script has ended, or for a while after its answer."""
    path, began_s = Path(request.answer), time.monotonic()
    late_s, end_s = began_s + SLOW_START_S, began_s + limit_s
    is_answered = request.to_the_end
    while process.poll() is None and time.monotonic() < end_s:
        time.sleep(POLL_S)
        now_s = time.monotonic()
        if not is_answered and path.exists():
            is_answered, answer = True, Answer.model_validate_json(path.read_bytes())
            found = answer.evidence
            if found is not None and found.world_size > 1:  # rank 0 waits, and so do the others
                end_all(process, place, (psutil.Process.kill,))
            end_s = now_s + (GRACE_S if answer.steps else 0.0)  # without steps it cannot attach
        if now_s > late_s:
            late_s = math.inf
            if request.timing is None and not (_seen(request) or "").startswith("step"):
                progress.say(
                    f"No optimizer step was seen in {SLOW_START_S:.0f} s. Waiting for one. "
                    "Ctrl+C ends the script."
                )


def _seen(request: Request) -> str | None:
    """Return how far the script has come, as in `SEEN`. None means it did not import torch."""
    try:
        return Path(request.answer + SEEN).read_text(encoding="utf-8")
    except OSError:
        return None


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
    answer, code, _ = run_script(command, request, as_json=as_json, progress=progress)
    return diagnosis_of(evidence_in(" ".join(command), answer, code)), code


def evidence_in(name: str, answer: Answer, code: int | None) -> Evidence:
    """Return what was measured of a script, with its failure.

    Raises: ConfigError when its environment has no flatout; RunFailed when nothing was measured.
    """
    evidence, failed = answer.evidence, code is not None and code > 0
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


def end_all(
    process: subprocess.Popen[bytes],
    request: str,
    hows: Sequence[Callable[[psutil.Process], None]] = (
        psutil.Process.terminate,
        psutil.Process.kill,
    ),
) -> None:
    """End a process, what it has started and what else knows the request, and wait for all."""
    for how in hows:
        alive = [one for one in psutil.process_iter() if _knows(one, request)]
        for one in alive:
            with suppress(psutil.Error):
                how(one)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)  # before psutil does, which would keep its exit code
        _, alive = psutil.wait_procs([one for one in alive if one.pid != process.pid], timeout=5)
        if not alive and process.poll() is not None:
            break


def _knows(process: psutil.Process, request: str) -> bool:
    """Return whether a process has the request in its environment, as all have that we started."""
    try:
        return process.environ().get(REQUEST) == request and process.pid != os.getpid()
    except (psutil.Error, OSError):
        return False
