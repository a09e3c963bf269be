"""Races two training commands, or one command in two revisions of its repository."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field

from flatout.assembly.recipe import Tolerance
from flatout.display import Show, gib, milliseconds
from flatout.distributed.spinning import say_if_busy
from flatout.errors import ConfigError, FlatoutError, Interrupted, RunFailed, in_shell
from flatout.hardware.machine import probe
from flatout.measure.output import git
from flatout.measure.race import Figure, LossCheck, Race, require_result
from flatout.measure.results import Measurement
from flatout.measure.scripts.request import Timing
from flatout.measure.scripts.scratch import Scratch
from flatout.measure.trial import Result, try_command
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored

SECONDS, STEPS, WARM_STEPS = 3.0, 12, 4
"""Fewest seconds and measured steps of a trial, and the steps of its warm-up."""
ROUNDS, MIN_ROUNDS = 10, 3
"""Most rounds, and those that the losses need."""
LONGEST_S = 900.0
"""A trial is ended after this."""
RTOL = 1e-3
"""How far losses may differ step by step. Otherwise their final values are compared over seeds."""
SLOWER = 3
"""The exit code of a command that is slower than asked."""
TOO_WIDE = 1.5
"""Ratio of the ends of an interval around 1 from which it decides nothing."""
GROWTH = 0.05
"""Growth of the peak memory that is reported."""


@dataclass(frozen=True)
class Side:
    """One of the two commands."""

    name: str
    command: tuple[str, ...]
    revision: str | None = None
    """Revision of the repository that it runs in. None: the files as they are."""


class SideRow(Stored):
    """What was measured of a command."""

    name: Annotated[str, Show()]
    """a or b."""
    command: Annotated[str, Show("command")]
    step_ms: Annotated[float, Show("step", lambda ms: milliseconds(ms / 1e3))]
    """Median over its trials of the mean time of a step."""
    peak_gib: Annotated[float | None, Show("peak", gib)]
    """Peak memory of the device, or on a CPU of the process."""
    compile_s: Annotated[float | None, Show("compiles", "{:.0f} s".format, unknown="")]
    """Seconds spent compiling. Null when nothing was compiled."""
    trials: Annotated[int, Show("n")]


class Comparison(Measurement):
    """Which of two commands is faster."""

    sides: Annotated[list[SideRow], Show()]
    """Both commands."""
    ratio: Figure
    """How many times as fast the second one is, by equal work."""
    work: float
    """How many times the work of the first command the second one does in a step."""
    losses: LossCheck
    """Whether their losses agree."""
    at_least: float | None
    """The ratio that was asked for."""
    notes: list[str] = Field([])
    """What else to know."""

    @property
    def is_slower(self) -> bool:
        """Whether it is sure that the second one is slower than asked."""
        return self.at_least is not None and (self.ratio.high or self.ratio.median) < self.at_least

    @property
    def exit_code(self) -> int:
        """3 if the second command is slower than asked; 130 or 143 after an interruption."""
        return (SLOWER if self.is_slower else 0) or super().exit_code

    @property
    def headline(self) -> str:
        """The result in a sentence."""
        by = "" if self.work == 1 else " by equal work"
        ended = "" if self.complete else "Interrupted. "
        text = f"b is {self.ratio.times()} as a{by}"
        if self.ratio.low is None or self.ratio.high is None:
            text += ": too few rounds to be sure"
        elif self.ratio.low <= 1 <= self.ratio.high:
            is_wide = self.ratio.high > TOO_WIDE * self.ratio.low
            text += ": too noisy to tell" if is_wide else ": no measurable difference"
        return f"{ended}{text}; losses {self.losses.words() or 'not compared'}."


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
    began_s = time.monotonic()
    one = Side("a", tuple(command), against)
    two = Side("b", tuple(other or command))
    if one.command == two.command and against is None:
        raise ConfigError(
            "Both commands are the same.",
            fix="Name two commands, or a revision: flatout compare --against main -- "
            f"{' '.join(map(in_shell, command))}",
        )
    here, notes = Path.cwd(), list[str]()
    source = here if against is None else repository_of(here, against)
    if against is not None and git(here, "status", "--porcelain", "--untracked-files=no"):
        notes.append("The directory has uncommitted changes. b runs with them, a without.")
    with ExitStack() as stack:
        copies = {
            side: stack.enter_context(Scratch(source, side.command))
            for side in ((one, two) if against else (two,))
        }
        copies.setdefault(one, copies[two])

        def start(side: Side, seed: int, limit_s: float) -> Result:
            copy = copies[side]
            copy.reset()
            if side.revision is not None:
                check_out(copy, side.revision)
            folder = copy.path / here.resolve().relative_to(copy.source)
            timing = Timing(steps=STEPS, seconds=SECONDS, warmup_steps=WARM_STEPS,
                            seed_offset=seed, limit_s=limit_s / 2)  # fmt: skip
            return try_command(side.command, timing, limit_s, folder=folder, copy=copy)

        race = Race[Side](
            start, total_s=60 * minutes, longest_s=LONGEST_S, clock=time.monotonic, began_s=began_s
        )
        failed: str | None = None
        say_if_busy(progress)
        with race.running(progress, "Comparing"):
            race.note("both commands in turns")
            failed = race.compare(
                two,
                one,
                rounds=ROUNDS,
                least=1.0 if at_least is None else at_least,
                is_open=lambda: race.round < MIN_ROUNDS,
            )
    require_result(race)
    ratio = race.gain(two, one)
    if ratio is None:
        raise why_unmeasured(race, (one, two), failed)
    rows = [row_of(side, race) for side in (one, two)]
    before, after = (row.peak_gib or 0.0 for row in rows)
    if before and after > (1 + GROWTH) * before:
        notes.append(f"b needs {gib(after - before)} more memory than a.")
    scaled = {name: end and work * end for name, end in ratio.model_dump().items()}
    return Comparison(
        path=str(here),
        machine=probe().describe(),
        **race.facts(),
        sides=rows,
        ratio=Figure(**scaled),
        work=work,
        losses=race.check(two, one, Tolerance.rounding(rtol=RTOL), loss_steps=1, is_strict=False),
        at_least=at_least,
        notes=notes,
    )


def why_unmeasured(race: Race[Side], sides: Sequence[Side], failed: str | None) -> FlatoutError:
    """Return the error of a race in which no round was complete."""
    if race.ended_by_signal is not None:
        return Interrupted(
            "Interrupted before both commands were measured.",
            fix="Run it again.",
            signal_number=race.ended_by_signal,
        )
    broken = next((side for side in sides if race.failure(side)), None)
    if broken is None:
        return RunFailed(
            "The time was up before both commands were measured.", fix="Give it more --minutes."
        )
    return RunFailed(
        f"{broken.name} could not be measured: {failed}.",
        fix="Run it alone first: trials have no standard input, and start in a copy of this "
        "directory.",
    )


def row_of(side: Side, race: Race[Side]) -> SideRow:
    """Return what was measured of a command."""
    results = race.results(side)
    where = f" ({side.revision})" if side.revision else ""
    return SideRow(
        name=side.name,
        command=f"{' '.join(map(in_shell, side.command))}{where}",
        step_ms=median(result.step_ms for result in results),
        peak_gib=max((one.peak_gib for one in results if one.peak_gib), default=None),
        compile_s=max((one.compile_s for one in results if one.compile_s), default=None),
        trials=len(results),
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
    tracked = (git(copy.source, "ls-files", "-z") or "").split("\0")
    kept = {*(git(copy.source, "ls-tree", "-rz", "--name-only", revision) or "").split("\0")}
    for name in tracked:
        if name and name not in kept:
            (copy.path / name).unlink(missing_ok=True)
    archive = ["git", "-C", str(copy.source), "archive", "--format=tar", revision]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
        done = subprocess.run(
            ["tar", "-x", "-C", str(copy.path)],
            stdin=packed.stdout,
            capture_output=True,
            check=False,
        )
    if packed.returncode or done.returncode:
        why = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise RunFailed(
            f"The files of revision {revision} cannot be read: {why or 'git archive failed'}.",
            fix="Check it out by hand, and compare two commands.",
        )
