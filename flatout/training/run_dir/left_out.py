"""The data that a run leaves out since it went back to an earlier checkpoint. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from flatout.files import Stored
from flatout.json_io import read_model, write_json
from flatout.training.run_dir.layout import LEFT_OUT

Position = Annotated[int, Field(ge=0)]


class Rewind(Stored):
    """One return to an earlier checkpoint."""

    from_step: int
    """The step at which training had diverged."""
    to_step: int
    """The step of the checkpoint; 0 for the start of the run."""
    steps: list[Annotated[list[Position], Field(min_length=2, max_length=2)]]
    """Position of each step to leave out, and of the step after it."""


class LeftOut(Stored):
    """The content of left_out.json."""

    format_version: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of the format."""
    rewinds: list[Rewind] = Field(default_factory=list)
    """Every return, in order."""

    def positions(self) -> dict[int, int]:
        """Return the position of each step to leave out, and that of the step after it."""
        return {start: stop for rewind in self.rewinds for start, stop in rewind.steps}


def read_left_out(folder: Path) -> LeftOut:
    """Return what a run leaves out; nothing when it never went back.

    Raises: CheckpointError when the file is damaged: without it the run would read other data.
    """
    path = folder / LEFT_OUT
    if not path.exists():
        return LeftOut()
    return read_model(path, LeftOut, fix=f"Restore {path} from a copy.")


def add_rewind(folder: Path, rewind: Rewind) -> None:
    """Store one more return, durably, before the run goes back."""
    known = read_left_out(folder)
    changed = known.model_copy(update={"rewinds": [*known.rewinds, rewind]})
    write_json(folder / LEFT_OUT, changed.model_dump(mode="json"))
