"""What is asked of a script that flatout measures, and what it answers. No torch."""

from __future__ import annotations

from pydantic import Field

from flatout.files import Stored
from flatout.measure.steps.evidence import Evidence


class Request(Stored):
    """What to measure of a script."""

    answer: str
    """File for the answer."""
    seconds: float
    """Seconds of ordinary steps."""
    steps: int | None = None
    """Steps, the warm-up included, after which the measurement ends; None: by the seconds."""
    to_the_end: bool = False
    """Whether the script runs on after that."""


class Site(Stored):
    """A place in a file at which the script makes a call that a patch may edit."""

    kind: str
    """optimizer, loader, gc-collect, empty-cache, anomaly, threads or zero-grad; or start: the
    imports of the script's main file, which have no position."""
    name: str
    """Class or function that is called."""
    file: str
    """Absolute path."""
    line: int = 0
    """First line of the call."""
    end_line: int = 0
    """Its last line."""
    column: int = 0
    """Where it starts in the first line, in bytes of UTF-8."""
    end_column: int = 0
    """Where it ends in the last one; 0: not known."""
    is_direct: bool = True
    """Whether this line makes the call itself; otherwise a library does that it calls."""
    parameters: tuple[str, ...] = ()
    """Parameters of the call, in order; () when they are not known."""
    names: dict[str, str] = Field(default_factory=dict)
    """Expressions of that line for the root "model" and for "torch", as far as there are any."""
    count: int = 0
    """Calls."""


class Answer(Stored):
    """What was found in a script."""

    evidence: Evidence | None = None
    """None: nothing was measured."""
    problem: str | None = None
    """Why not."""
    steps: int = 0
    """Steps that were seen."""
    sites: tuple[Site, ...] = ()
    """Calls that a patch may edit."""
