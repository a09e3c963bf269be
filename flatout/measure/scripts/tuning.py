"""What `flatout tune` found about a script: the table, the patch, and how to use both. No torch."""

from __future__ import annotations

import math

from pydantic import ConfigDict, Field

from flatout.display import duration
from flatout.errors import in_shell
from flatout.measure.experiments.records import Figure, Left, LossCheck
from flatout.measure.experiments.report import NO_TIME
from flatout.measure.scripts.patch import ByHand
from flatout.progress import counted
from flatout.storage.json_io import Result

MOST_NAMED = 5
"""Written files that are named."""
APART = 1.25
"""Ratio from which the product of the gains and the whole gain contradict each other."""
UNPROVEN = "not proven"
"""Starts the reason of a change that was faster, and not often enough to be sure."""
FILE, CHANGES = "tuning.json", "changes.txt"
"""Names of the result, and of its summary beside the records with the changes."""


class ChangeRow(LossCheck):
    """A change that was measured. The search fills it."""

    model_config = ConfigDict(frozen=False)

    name: str
    does: str
    """What it does, in a few words."""
    against: list[str] = Field([])
    """Changes that were applied on both sides."""
    gain: Figure | None = None
    """How many times faster with it. None means it failed, or its first trial was no faster."""
    first_gain: float | None = None
    """The ratio of its first trial to the unchanged script beside it."""
    taken: bool = False
    """Whether it is one of the winners."""
    reason: str | None = None
    """Why not."""
    compile_s: float | None = None
    """Seconds that compiling takes, once per start."""
    peak_gib: float | None = None
    """Peak memory with it."""


class ScriptTuning(Result):
    """What makes a script faster, and the patch that does it."""

    format_version: int = 1
    command: list[str]
    """The script's command."""
    machine: str
    verdict: str
    """What `diagnose` finds in the unchanged script."""
    step_ms: float | None
    """Time of an unchanged step."""
    steps: int
    """Steps of a trial."""
    num_trials: int
    changes: list[ChangeRow]
    """The measured changes, in order."""
    not_tried: list[Left]
    """Changes that were not measured, and why."""
    taken: list[str]
    """The winners, in the order in which they were added."""
    gain: Figure | None = None
    """How many times faster all winners make it. None without any."""
    gain_losses: LossCheck | None = None
    """The losses with all winners."""
    loss_noise: float | None
    """Largest relative difference of a loss between two runs of the unchanged script."""
    patch: str = ""
    """The winners as a unified diff. "" means none."""
    by_hand: list[ByHand] = Field([])
    """What to write where no exact edit is possible."""
    verified: Figure | None = None
    """How many times faster the patched script is. None means it was not run."""
    verified_losses: LossCheck | None = None
    """Its losses."""
    withheld: str | None = None
    """Why no patch is given, although there are winners."""
    written: list[str]
    """Files that the script wrote in its directory. The trials wrote them in a copy."""
    written_outside: list[str]
    """Files elsewhere that it opened for writing, which are not protected."""
    path: str
    """Directory of tuning.json, changes.patch, and the losses before and after."""
    wall_s: float
    ended_by_signal: int | None = None
    """The signal that interrupted it: 2 for Ctrl+C, 15 for SIGTERM. Null for none."""

    @property
    def exit_code(self) -> int:
        """130 or 143 after an interruption, even though there are results."""
        return 0 if self.ended_by_signal is None else 128 + self.ended_by_signal

    def summary(self) -> str:
        """Return the table, the patch, and how to use both."""
        lines = ["Interrupted. These are the results so far.", ""] * bool(self.ended_by_signal)
        lines += [self.verdict, ""]
        width = max((len(row.name) for row in self.changes), default=0)
        lines += [
            f"{'+' if row.taken else ' '} {row.name:<{width}}  {row_text(row)}"
            for row in sorted(self.changes, key=lambda row: not row.taken)
        ]
        lines += ["", self.total()]
        if self.loss_noise:
            noise = f"Two runs of the unchanged script differ by up to {self.loss_noise:.0e} in"
            lines.append(f"{noise} their losses.")
        late = [one.name for one in self.not_tried if one.reason == NO_TIME]
        if late:
            lines.append(f"There was not enough time for {', '.join(late)}. Add --minutes.")
        if self.withheld:
            lines.append(self.withheld)
        if self.patch:
            proof = f"The patched script: {figure_text(self.verified)}." if self.verified else ""
            lines += ["", self.patch.rstrip(), "", proof]
            lines.append(f"Apply it: git apply {in_shell(self.path)}/changes.patch")
        for one in self.by_hand:
            where = f"{one.file}:{one.line}: " if one.file else ""
            lines.append(f"By hand, {one.change}: {where}{one.words}")
        if self.taken:
            command = " ".join(map(in_shell, self.command))
            lines.append(f"Without editing: flatout run --with {','.join(self.taken)} -- {command}")
        if self.written:
            names = ", ".join(self.written[:MOST_NAMED])
            lines.append(f"The script wrote {names} in the copy of this directory alone.")
        if self.written_outside:
            lines.append(f"The script also wrote {', '.join(self.written_outside)}.")
        trials = counted(self.num_trials, "trial")
        return "\n".join([*lines, f"{trials} in {duration(self.wall_s)}; {self.path}/"])

    def total(self) -> str:
        """Return the total gain as a sentence."""
        if not self.taken:
            unproven = max(
                (row for row in self.changes if UNPROVEN in (row.reason or "")),
                key=lambda row: row.first_gain or 0.0,
                default=None,
            )
            if unproven is not None:
                return f"{unproven.name} may be faster, which is {UNPROVEN}. Add --minutes."
            if not self.changes:
                return "No change was measured."
            return "Nothing that was measured makes the script faster."
        product = math.prod(row.gain.median for row in self.changes if row.taken and row.gain)
        if self.gain is None:
            return f"Together: about {product:.2f} times as fast, the product of the gains."
        kept = self.gain_losses and loss_words(self.gain_losses)
        text = f"Together: {figure_text(self.gain)}{f'; losses {kept}' if kept else ''}."
        if not 1 / APART < product / self.gain.median < APART:
            text += (
                f" The single gains multiply to {product:.2f}: what else runs here changes them."
            )
        return text


def figure_text(figure: Figure) -> str:
    """Return a gain with its interval."""
    return f"{figure.median:.2f} times as fast{figure.between('.2f')}"


def row_text(row: ChangeRow) -> str:
    """Return what a change gained, its losses and what it costs."""
    parts = [figure_text(row.gain)] if row.gain else []
    if row.gain is None and row.first_gain:
        parts.append(f"{row.first_gain:.2f} times as fast in one trial")
    parts += [row.reason] if row.reason else []
    parts += [f"losses {loss_words(row)}"] if row.within_tolerance is not None else []
    parts += [f"compiles for {row.compile_s:.0f} s"] if row.compile_s else []
    parts += [f"peak {row.peak_gib:.2f} GiB"] if row.peak_gib else []
    return "; ".join(parts)


def loss_words(check: LossCheck) -> str:
    """Return how far losses are apart, and why, if that exceeds the tolerance."""
    apart = f"{check.loss_difference:.0e} apart" if check.loss_difference else "equal"
    if check.loss_difference is None:
        apart = "not comparable"
    return f"{apart}{'' if check.within_tolerance else f' ({check.tolerance_reason})'}"
