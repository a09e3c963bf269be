"""Runs somebody's training script with flatout attached, and returns what was found. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import ValidationError

from flatout.errors import ConfigError, RunFailed
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.scripts.request import Answer, Request
from flatout.parallel.rendezvous import own_environment

POLL_S = 0.1
GRACE_S = 20.0
"""How long a script may take to end after it was measured, and at most after Ctrl+C."""
HOOK = Path(__file__).with_name("sitecustomize.py")


def measure_script(
    command: Sequence[str],
    *,
    seconds: float,
    steps: int | None = None,
    to_the_end: bool = False,
    as_json: bool = False,
) -> tuple[Answer, int | None]:
    """Run a script until its steps are measured; return the answer and its exit code.

    Its code, its directory and its environment are not changed. Standard input and output are its
    own; with `as_json` its output goes to standard error. The exit code is None if the script had
    to be ended, since it did not end by itself after the measurement.
    Raises: ConfigError when the program does not exist; RunFailed when nothing was measured.
    """
    words = [*command]
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    if shutil.which(words[0]) is None:
        shell = (
            " For a pipeline or variables, use a shell: -- sh -c '...'." if " " in words[0] else ""
        )
        raise ConfigError(
            f"There is no program {words[0]!r}.",
            fix=f"Write the command as in a terminal: flatout diagnose -- python train.py.{shell}",
        )
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        shutil.copyfile(HOOK, folder / "sitecustomize.py")
        request = Request(
            answer=str(folder / "answer.json"), seconds=seconds, steps=steps, to_the_end=to_the_end
        )
        (folder / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
        own = own_environment()
        paths = [name, *filter(None, [own.get("PYTHONPATH")])]
        environment = {
            **own,
            "PYTHONPATH": os.pathsep.join(paths),
            "FLATOUT_ATTACH": str(folder / "request.json"),
        }
        output = sys.stderr if as_json else None
        process = subprocess.Popen(words, env=environment, stdout=output)
        answered_s = None
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if answered_s is None and Path(request.answer).exists():
                    answered_s = time.monotonic()
                if answered_s and not to_the_end and time.monotonic() - answered_s > GRACE_S:
                    break
        finally:
            end_tree(process)
        try:
            answer = Answer.model_validate_json(Path(request.answer).read_bytes())
        except (OSError, ValidationError):
            answer = Answer(problem="no optimizer of torch took a step in it")
        return answer, process.returncode


def diagnose_script(
    command: Sequence[str],
    *,
    seconds: float,
    steps: int | None = None,
    to_the_end: bool = False,
) -> Diagnosis:
    """Measure a training script without an edit, and return the findings.

    Raises: ConfigError when the program does not exist; RunFailed when nothing was measured.
    """
    answer, code = measure_script(command, seconds=seconds, steps=steps, to_the_end=to_the_end)
    if answer.evidence is None:
        ended = "" if code in (0, None) else f" It ended with exit code {code}; its error is above."
        raise RunFailed(
            f"No step of `{' '.join(command)}` was measured: "
            f"{(answer.problem or 'unknown').rstrip('.')}.{ended}",
            fix="Run it alone first. A step is one of an optimizer of torch.optim, in the process "
            "that is started or one of its children.",
        )
    return diagnosis_of(answer.evidence)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, and wait for them."""
    with suppress(psutil.NoSuchProcess):
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for one in tree:
            with suppress(psutil.NoSuchProcess):
                one.terminate()
        _, alive = psutil.wait_procs(tree, timeout=5)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
