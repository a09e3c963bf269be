"""What is asked of a script that flatout measures, and what it answers. No torch."""

from __future__ import annotations

from flatout.files import Stored
from flatout.measure.steps.evidence import Evidence

SEEN = ".seen"
"""Added to the name of the answer's file: a file that says how far the script has come: `torch` or
`step`.
"""


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


class Answer(Stored):
    """What was found in a script."""

    evidence: Evidence | None = None
    """None: nothing was measured."""
    problem: str | None = None
    """Why not."""
    steps: int = 0
    """Steps that were seen."""
