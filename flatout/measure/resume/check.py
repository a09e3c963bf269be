"""Proves that stopping and resuming a recipe changes nothing: trains both ways, and compares.

Three processes train the recipe as it is, its model, data, speedups and length: one to step N + M,
one to step N, and one that resumes it to step N + M. Signals stop them, as Ctrl+C does. All write
to a temporary directory, which is removed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from flatout.config.schema import RunConfig, validate
from flatout.config.sections import CheckpointConfig, LogConfig
from flatout.config.trust import forget
from flatout.distributed.launch import launch, num_processes, own_environment
from flatout.distributed.rendezvous import stated_ranks
from flatout.errors import (
    ConfigError,
    FlatoutError,
    HardwareError,
    RunFailed,
    Stopped,
)
from flatout.hardware.machine import pick_device, probe, usable_cores
from flatout.measure.child import Told, end_group, python, start_child
from flatout.measure.experiments.schedule import require_one_process
from flatout.measure.resume.compare import (
    Comparison,
    causes_of,
    compare_runs,
    is_deterministic,
)
from flatout.measure.resume.proof import FIXED, ResumeProof
from flatout.progress import SILENT, Progress
from flatout.storage.cache import default_cache
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject, read_model, write_json
from flatout.training.checkpoint import catalog
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training
from flatout.training.run_dir import layout

PROGRAM = "from flatout.measure.resume.check import main; main()"
DEFAULT_STEPS = (5, 5)
WHOLE, PARTS = "whole", "parts"
"""Run directories: without a stop, and with one."""
MOST_SHOWN = 5


def steps_of(text: str | None, config: RunConfig) -> tuple[int, int]:
    """Return the steps before and after the stop that `--steps N,M` states.

    Without it, a recipe of fewer than ten steps is stopped in its middle.
    Raises: ConfigError when the text is not two numbers, or the recipe has fewer steps.
    """
    total = config.train.steps
    if text is None:
        steps = DEFAULT_STEPS if total is None else halves(min(total, sum(DEFAULT_STEPS)))
    else:
        found = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
        steps = (int(found[1]), int(found[2])) if found else (0, 0)
        if not all(steps):
            raise ConfigError(
                f"--steps {text!r} is not two numbers of steps.",
                fix="Write --steps 5,5: five steps, a stop, and five more.",
            )
    if total is not None:
        require_length(total, steps)
    return steps


def halves(total: int) -> tuple[int, int]:
    """Return two numbers of steps that add up to `total`."""
    return total // 2, total - total // 2


def require_length(total: int, steps: tuple[int, int]) -> None:
    """Check that a recipe of `total` steps can be stopped and continued for these steps.

    Raises: ConfigError.
    """
    if total < 2:
        raise ConfigError(
            "A recipe of 1 step cannot be stopped and resumed.", fix="Set train.steps=2, or more."
        )
    if total < sum(steps):
        first, after = halves(total)
        raise ConfigError(
            f"--steps {steps[0]},{steps[1]} needs {sum(steps)} steps, but the recipe has {total}.",
            fix=f"Give --steps {first},{after}, or set train.steps={sum(steps)}.",
        )


def prove_resume(
    config: RunConfig, steps: tuple[int, int], *, progress: Progress = SILENT
) -> ResumeProof:
    """Train a recipe with and without a stop, and return what differs.

    On a GPU it trains with train.deterministic=true: otherwise any two runs differ.

    Cost: twice the N + M steps, three starts, and four checkpoints of disk.
    Raises: UsageError, RunFailed as training does.
    """
    require_one_process("verify --resume")
    stop, end = steps[0], sum(steps)
    device, _ = pick_device(config.train.device, probe())
    fixes = device.startswith("cuda") and not config.train.deterministic
    if fixes:
        config = config.with_values({"train.deterministic": True})
        progress.say(FIXED)
    with tempfile.TemporaryDirectory(prefix="flatout-verify-") as name:
        whole, parts = Path(name) / WHOLE, Path(name) / PARTS
        try:
            asked = to_compare(config, stop=stop, end=end)
            reached = _train(asked, whole, end, f"Training to step {end} without a stop", progress)
            if reached < end:
                require_length(reached, steps)
            chosen = layout.read_config(whole)
            assert chosen is not None, "a run that has trained has a configuration"
            stopped = _train(chosen, parts, stop, f"Training to step {stop}", progress)
            if stopped >= reached:
                raise ConfigError(
                    f"The run reached its last step, {reached}, before it could be stopped: "
                    "several processes stop one step later.",
                    fix=f"Set train.steps={reached + 2}, or more.",
                )
            _train(chosen, parts, end, f"Resuming at step {stopped}, to step {end}", progress)
            with progress.task("Comparing every bit"):
                found = compare_runs(whole, parts, saved=stop, stop=stopped, end=reached)
            return proof_of(found, chosen).model_copy(update={"made_deterministic": fixes})
        finally:
            for folder in (whole, parts):
                forget(folder)


def to_compare(config: RunConfig, *, stop: int, end: int) -> RunConfig:
    """Return a recipe that records every step, and saves at the stop and at the end.

    Its loggers, observers and checkpoints elsewhere are disabled. What it computes stays the same.
    """
    kept = end // stop + 1
    if config.train.devices not in (None, 1):
        kept += 2  # several ranks stop one step later, and save there too
    saves = CheckpointConfig(every_steps=stop, keep=kept, best=False)
    return config.model_copy(update={"checkpoint": saves, "log": LogConfig(every=1, to=())})


def proof_of(found: Comparison, config: RunConfig) -> ResumeProof:
    """Return the proof of a comparison, with the first differences of each kind as sentences."""
    groups: dict[str, list[str]] = {}
    for one in found.different:
        where = "Step" if one.kind == "figure" else "Checkpoint of step"
        group = groups.setdefault(
            "figure" if one.kind == "figure" else f"{one.kind} {one.step}", []
        )
        group.append(f"{where} {one.step}: {one.name} {one.text}.")
    lines = []
    for group in groups.values():
        lines += group[:MOST_SHOWN]
        if len(group) > MOST_SHOWN:
            lines.append(f"... and {len(group) - MOST_SHOWN:,} more like these.")
    return ResumeProof(
        steps_before=found.stop,
        steps_after=found.end - found.stop,
        device=config.train.device,
        deterministic=is_deterministic(config),
        is_equal=not found.different,
        tensors=found.tensors,
        bytes=found.num_bytes,
        values=found.values,
        figures=found.figures,
        first_step=found.first_step,
        first_tensor=next((one.name for one in found.different if one.kind == "tensor"), None),
        differences=lines,
        causes=causes_of(found, config) if found.different else [],
    )


def _train(config: RunConfig, folder: Path, stop_after: int, what: str, progress: Progress) -> int:
    """Train or resume a run in a fresh process for each rank, until it stops after a step.

    Returns: the step that it reached.
    Raises: the error of the process; RunFailed when it died.
    """
    outcome, job = folder.with_suffix(".outcome"), folder.with_suffix(".job")
    document = Job(
        config=config.to_dict(), folder=str(folder), stop_after=stop_after, outcome=str(outcome)
    )
    write_json(job, document.model_dump())
    command = python(PROGRAM, str(job))
    count = 1
    if config.train.devices:
        count = num_processes(config.train.devices, config.train.device, probe())
    with progress.task(what):
        code, last_words = _run(command, count)
    if code in (0, Stopped.exit_code):
        return max(catalog.steps(folder), default=0)
    if outcome.exists():
        raise error_of(read_model(outcome, Told), folder.parent)
    died = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    raise RunFailed(
        f"{what}: the process {died}: {last_words.rstrip('.')}.",
        fix="Try the same recipe with `flatout train`.",
    )


def _run(command: list[str], count: int) -> tuple[int, str]:
    """Run a command as `count` ranks, and return its exit code, and the last line of its errors."""
    if count > 1:
        return launch(command, count, own_environment(), usable_cores()), "see its messages above"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            start_new_session=True,
            text=True,
        )
        try:
            code = process.wait()
        finally:
            end_group(process)
        complaints.seek(0)
        return code, (complaints.read().strip().splitlines() or ["nothing"])[-1][:300]


def error_of(told: Told, work: Path) -> FlatoutError:
    """Return the error that ended a process. About a full disk, it has a fix for this command."""
    error = told.raised()
    if isinstance(error, HardwareError) and str(work) in error.what:
        fix = "Free space there, or set TMPDIR to a directory on a larger disk."
        return HardwareError(error.what, fix=fix)
    return error


class Job(Stored):
    """What one process trains."""

    config: JsonObject
    """The configuration."""
    folder: str
    """The run directory: new, or with a run that was stopped."""
    stop_after: int
    """The step after which to stop, as Ctrl+C does."""
    outcome: str
    """File for the error that ended the process. One that did what it should writes none."""


class StopAfter(Quiet):
    """An observer that interrupts the run after a step, unless that is its last."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_tick(self, step: int, last_step: int) -> None:
        """Send SIGINT to this process. All ranks then stop at the same step."""
        if step == self._step and step < last_step:
            os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Train as the file named on the command line describes, and exit with the run's code."""
    start_child()
    job = read_model(Path(sys.argv[1]), Job)
    raise SystemExit(train(validate(job.config), job))


def train(config: RunConfig, job: Job) -> int:
    """Train or resume the run of a job until it stops, and return the exit code.

    Rank 0 writes the outcome after an error.
    """
    stopper = StopAfter(job.stop_after)
    try:
        run_training(config, Path(job.folder), observers=[stopper], cache=default_cache())
    except FlatoutError as error:
        if not isinstance(error, Stopped) and stated_ranks().rank == 0:
            write_json(Path(job.outcome), Told.of(error).model_dump())
        return error.exit_code
    return 0
