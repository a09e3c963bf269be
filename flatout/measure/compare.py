"""Races two training commands, or one command in two revisions of its repository."""

from __future__ import annotations

import math
import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flatout.assembly.speedup import Tolerance
from flatout.display import Show
from flatout.errors import ConfigError, RunFailed
from flatout.measure.attach.request import Request, Timing
from flatout.measure.intervals import Figure
from flatout.measure.output import git
from flatout.measure.race import LossCheck, Race, Row
from flatout.measure.results import Measurement, facts_of
from flatout.measure.scripts.scratch import Scratch
from flatout.measure.trial import (
    Result,
    program_in,
    run_in_copy,
    waiting_beside_others,
)
from flatout.progress import SILENT, Progress

SECONDS, STEPS, WARM_STEPS = 3.0, 12, 4
"""Fewest seconds and measured steps of a trial, and the steps of its warm-up."""
ROUNDS = 10
"""Most rounds."""
LONGEST_S = 900.0
"""A trial is ended after this."""
RTOL = 1e-3
"""How far losses may differ step by step. Otherwise their final values are compared over seeds."""
SLOWER = 3
"""The exit code of a command that is slower than asked."""
TOO_WIDE = 1.5
"""Ratio of the ends of an interval around 1 from which it decides nothing."""


@dataclass(frozen=True)
class Side:
    """One of the two commands."""

    name: str
    command: tuple[str, ...]
    revision: str | None = None
    """Revision of the repository that it runs in. None: the files as they are."""

    def describe(self) -> str:
        """Return its name, its command and its revision."""
        where = f" ({self.revision})" if self.revision else ""
        return f"{self.name}: {shlex.join(self.command)}{where}"


class Comparison(Measurement):
    """Which of two commands is faster."""

    sides: Annotated[list[Row], Show()]
    """What was measured of both commands."""
    ratio: Figure
    """How many times as fast the second one is, by equal work."""
    work: float
    """How many times the work of the first command the second one does in a step."""
    losses: LossCheck
    """Whether their losses agree."""
    at_least: float | None
    """The ratio that was asked for."""

    @property
    def is_slower(self) -> bool:
        """Whether it is sure that the second one is slower than asked."""
        return (self.ratio.high or math.inf) < (self.at_least or 0.0)

    @property
    def exit_code(self) -> int:
        """3 if the second command is slower than asked; 130 or 143 after an interruption."""
        return (SLOWER if self.is_slower else 0) or super().exit_code

    @property
    def headline(self) -> str:
        """The result in a sentence."""
        (low, high), sure = (self.ratio.low, self.ratio.high), ""
        if low is None or high is None:
            sure = ": too few rounds to be sure"
        elif low <= 1 <= high:
            sure = ": too noisy to tell" if high > TOO_WIDE * low else ": no measurable difference"
        text = f"b is {self.ratio.times()} as a{' by equal work' * (self.work != 1)}{sure}"
        return f"{self.ended}{text}; losses {self.losses.words() or 'not compared'}."


def compare_commands(
    command: Sequence[str],
    other: Sequence[str] = (),
    *,
    against: str | None = None,
    at_least: float | None = None,
    work: float = 1.0,
    minutes: float = 5.0,
    progress: Progress = SILENT,
) -> Comparison:
    """Race two commands in turns, each in a copy of the directory, and return which is faster.

    With `against`, the first one is the command in another revision of the repository.

    Raises: ConfigError when they are the same, or the revision does not exist; RunFailed when one
            of them fails, or takes too few steps; Interrupted before there are results.
    """
    began_s, here, notes = time.monotonic(), Path.cwd(), list[str]()
    one, two = Side("a", tuple(command), against), Side("b", tuple(other or command))
    if one.command == two.command and against is None:
        raise ConfigError(
            "Both commands are the same.",
            fix="Name two commands, or a revision: flatout compare --against main -- "
            f"{shlex.join(command)}",
        )
    for side in (one, two):
        program_in(side.command)
    source = here if against is None else repository_of(here, against)
    if against is not None and git(here, "status", "--porcelain", "--untracked-files=no"):
        notes.append("The directory has uncommitted changes. b runs with them, a without.")
    environment = waiting_beside_others(progress)
    with ExitStack() as stack:
        copies = {two: stack.enter_context(Scratch(source))}
        copies[one] = stack.enter_context(Scratch(source)) if against else copies[two]

        def start(side: Side, seed: int, limit_s: float) -> Result:
            copy = copies[side]
            copy.reset()
            if side.revision is not None:
                check_out(copy, side.revision)
            timing = Timing(steps=STEPS, seconds=SECONDS, warmup_steps=WARM_STEPS,
                            seed_offset=seed, limit_s=limit_s / 2)  # fmt: skip
            return run_in_copy(copy, side.command, Request(timing=timing), limit_s=limit_s,
                               environment=environment)  # fmt: skip

        race = Race(
            start,
            lambda *_: Tolerance.rounding(rtol=RTOL),
            total_s=60 * minutes,
            longest_s=LONGEST_S,
            loss_steps=1,
            is_strict=False,
            name=lambda side: side.name,
            began_s=began_s,
        )
        with race.running(progress, "Comparing"):
            least = (1.0 if at_least is None else at_least) / work
            race.compare(two, one, rounds=ROUNDS, least=least)
    ratio = race.gain(two, one)
    for side in (one, two):
        failed = race.failure(side)
        if failed and ratio is None:
            raise RunFailed(
                f"{side.name} could not be measured: {failed.reason}.",
                fix="Run it alone first: trials have no standard input, and start in a copy of "
                "this directory.",
            )
        if failed:
            notes.append(f"{side.name} failed in one trial, which ended it: {failed.reason}.")
    if ratio is None:
        race.done.clear()  # half a round compares nothing
        race.require_result()
    scaled = {name: end and work * end for name, end in dict(ratio or ()).items()}
    return Comparison(
        path=str(here),
        **facts_of(race),
        sides=[race.row(side, name=side.describe()) for side in (one, two)],
        ratio=Figure(**scaled),
        work=work,
        losses=race.check(two, one),
        at_least=at_least,
        notes=notes,
    )


def repository_of(folder: Path, revision: str) -> Path:
    """Return the top directory of the repository of a directory, which has the revision.

    Raises: ConfigError.
    """
    top = git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        raise ConfigError(
            f"{folder} is not in a git repository, so there is no revision to compare with.",
            fix="Name two commands instead: flatout compare -- COMMAND -- OTHER COMMAND.",
        )
    if git(folder, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        raise ConfigError(
            f"There is no revision {revision!r} in {top}.",
            fix="`git log --oneline` shows revisions, `git branch` names.",
        )
    return Path(top)


def check_out(copy: Scratch, revision: str) -> None:
    """Replace the tracked files of a copy by those of a revision. Other files stay.

    Raises: RunFailed when git cannot read them.
    """
    with tempfile.TemporaryDirectory() as folder:
        for words in (["HEAD"], ["--reset", "-u", revision]):
            copied = f"--work-tree={copy.path}", "read-tree", *words
            if git(copy.source, *copied, GIT_INDEX_FILE=f"{folder}/index") is None:
                raise RunFailed(
                    f"The files of revision {revision} cannot be read.",
                    fix="Check it out by hand, and compare two commands.",
                )
