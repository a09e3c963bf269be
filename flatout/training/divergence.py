"""What a run does after too many bad steps in a row: a report, then an end or a rewind.

The updates of bad steps were skipped, so the weights are still those before the first of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field

from flatout.assembly.run import Run
from flatout.errors import Diverged, in_shell
from flatout.progress import counted
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject, parsing, read_json, read_model, write_json
from flatout.training.checkpoint import catalog
from flatout.training.metrics.bad_steps import BadStep
from flatout.training.metrics.log import LESS_STEEP, Log
from flatout.training.run_dir.layout import DIVERGENCE, LEFT_OUT
from flatout.training.run_dir.resume import read_origin
from flatout.training.saving import wait_for_saves

MOST_SEQUENCES = 64
"""Sequences of a step that a report lists."""
Position = Annotated[int, Field(ge=0)]


class Rewind(Stored):
    """One return to an earlier checkpoint."""

    from_step: int
    """The step at which training had diverged."""
    to_step: int
    """The step of the checkpoint. 0 for the start of the run."""
    steps: list[Annotated[list[Position], Field(min_length=2, max_length=2)]]
    """Position of each step to skip, and of the step after it."""


class LeftOut(Stored):
    """The content of left_out.json."""

    format_version: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of the format."""
    rewinds: list[Rewind] = Field(default_factory=list)
    """Every return, in order."""

    def positions(self) -> dict[int, int]:
        """Return the position of each step to skip, and that of the step after it."""
        return {start: stop for rewind in self.rewinds for start, stop in rewind.steps}


def read_left_out(folder: Path) -> LeftOut:
    """Return the data that a run skips. Nothing when it never went back.

    Raises: CheckpointError when the file is damaged: without it the run would read other data.
    """
    path = folder / LEFT_OUT
    if not path.exists():
        return LeftOut()
    return read_model(path, LeftOut, fix=f"Restore {path} from a copy.")


class Rewound(Diverged):
    """Training has diverged, and the run directory is ready to continue from an earlier step."""


def require_good_steps(run: Run, log: Log, *, flush: bool = False) -> None:
    """End the run, or rewind it, when `train.max_bad_steps` steps in a row were bad.

    All ranks call it at the same points. On a GPU it knows the last step only with `flush`. The
    report, divergence.json, names the data of these steps.

    Raises: Diverged with the cause; Rewound when the run is to continue from an earlier step.
    """
    if flush:
        log.write_pending()
    if log.bad_steps.in_a_row < run.guard.most:
        return
    log.write_pending()
    bad = [one for one in log.bad_steps.last if one.in_a_row <= run.guard.most]
    wait_for_saves(run, log)
    good, left_out = run.mesh.broadcast_object(
        (last_good(run.folder), read_left_out(run.folder))
        if run.mesh.is_main
        else (None, LeftOut())
    )
    rewinds = len(left_out.rewinds)
    if run.mesh.is_main:
        report: JsonObject = {
            "format_version": 1,
            "step": bad[-1].step,
            "reason": bad[-1].reason,
            "bad_steps": [one.to_dict() for one in bad],
            "data": run.loader.data_at(bad[-1].start)[:MOST_SEQUENCES],
            "last_good_checkpoint": None if good is None else str(good),
            "on_divergence": run.config.train.on_divergence,
        }
        write_json(run.folder / DIVERGENCE, report)
    last, count = bad[-1].step, bad[-1].in_a_row  # the first ones may be of an earlier process
    steps = f"{count} bad steps in a row, the last one step {last}"
    what = (
        f"Training has diverged: {steps if count > 1 else f'step {last} was bad'}: "
        f"{bad[-1].reason}. "
        f"{run.folder / DIVERGENCE} names its data."
    )
    most = run.config.train.max_rewinds
    if run.config.train.on_divergence == "rewind" and rewinds < most:
        _rewind(run, log, left_out, bad, good, what)
    at = "at the start" if good is None else f"from {in_shell(good)}"
    fix = (
        f"Run the same command with train.on_divergence=rewind: it continues {at} without the data "
        f"of these steps. Or: {LESS_STEEP[0].lower()}{LESS_STEEP[1:]}"
    )
    if rewinds >= most:
        fix = f"The run was rewound as often as train.max_rewinds={most} allows. {LESS_STEEP}"
    raise Diverged(what, fix=fix)


def _rewind(
    run: Run, log: Log, left_out: LeftOut, bad: list[BadStep], good: Path | None, what: str
) -> NoReturn:
    """Prepare the run directory for a start from the last good checkpoint, and raise Rewound."""
    origin = read_origin(run.folder)
    start = catalog.step_of(Path(origin.checkpoint)) if origin else 0
    to_step = start if good is None else catalog.step_of(good)
    steps = [[one.start, one.stop] for one in bad]
    text = f"The run goes back to step {to_step} and skips the data of "
    text += f"{counted(len(bad), 'step')}."
    if run.mesh.is_main:
        left_out.rewinds.append(Rewind(from_step=run.step, to_step=to_step, steps=steps))
        write_json(run.folder / LEFT_OUT, left_out.model_dump(mode="json"))  # before it goes back
        catalog.set_aside(run.folder, after=-1 if good is None else to_step)
    run.mesh.barrier()
    log.event("rewind", to_step=to_step, positions=steps, text=text)
    log.progress.say(f"{what} {text}")
    raise Rewound(what, fix=f"Run the same command again. {text}")


def last_good(folder: Path) -> Path | None:
    """Return the newest complete checkpoint that was not saved between bad steps, if any."""
    for step in reversed(catalog.steps(folder)):
        path = catalog.checkpoint_path(folder, step)
        if catalog.verify(path):
            continue
        with parsing(path / catalog.STATE):
            if not read_json(path / catalog.STATE)["values"].get("guard", {}).get("streak"):
                return path
    return None
