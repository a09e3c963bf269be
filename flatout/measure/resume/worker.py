"""The process that trains for `verify --resume`: a run of its own, which a signal stops."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from flatout.cache import default_cache
from flatout.config.schema import RunConfig, validate
from flatout.errors import FlatoutError, Stopped
from flatout.files import Stored
from flatout.json_io import JsonObject, read_json, write_json
from flatout.measure.child import Told, start_child
from flatout.parallel.rendezvous import stated_ranks
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training

PROGRAM = "from flatout.measure.resume.worker import main; main()"


class Job(Stored):
    """What one process trains."""

    config: JsonObject
    """The configuration."""
    folder: str
    """The run directory: new, or with a run that was stopped."""
    stop_after: int
    """The step after which to stop, as Ctrl+C does."""
    outcome: str
    """File for the error that ended the process; one that did what it should writes none."""


class StopAfter(Quiet):
    """An observer that interrupts the run after a step, unless that is its last."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_tick(self, step: int, last_step: int) -> None:
        """Send SIGINT to this process; all ranks then stop at the same step."""
        if step == self._step and step < last_step:
            os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Train as the file named on the command line says, and exit with the run's code."""
    start_child()
    job = Job.model_validate(read_json(Path(sys.argv[1])))
    raise SystemExit(train(validate(job.config), job))


def train(config: RunConfig, job: Job) -> int:
    """Train or resume the run of a job until it stops, and return the exit code.

    The main rank writes the outcome after an error.
    """
    stopper = StopAfter(job.stop_after)  # type: ignore[abstract]  # Quiet's methods do nothing
    try:
        run_training(config, Path(job.folder), observers=[stopper], cache=default_cache())
    except FlatoutError as error:
        if not isinstance(error, Stopped) and stated_ranks().rank == 0:
            write_json(Path(job.outcome), Told.of(error).model_dump())
        return error.exit_code
    return 0
