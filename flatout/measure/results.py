"""What `flatout bench` and `flatout tune` found, and how it is shown. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from flatout.display import Column, Display, Table, duration, table_of
from flatout.hardware.machine import probe
from flatout.measure.intervals import Figure
from flatout.measure.output import commit_of_package
from flatout.measure.race import LossCheck, Race, Row
from flatout.measure.scripts.patch import ByHand
from flatout.progress import counted
from flatout.storage.json_io import Result
from flatout.storage.streams import shortened

FORMAT_VERSION = 6
PARTS = ("batch", "checkpointing", "speedups")
"""What `flatout tune` varies. The order is that of the first measurements."""
HEADINGS = {
    ("baseline", "added"): "Add one: each speedup on top of the previous ones",
    ("leave-one-out",): "Leave one out: what each speedup is worth in the full set",
    ("add-one",): "Add one to the full set: speedups that are off by default",
    ("point",): "",
}
"""The kinds of rows in each table of a bench, and its title."""


class Measurement(Result):
    """What an experiment found, and how it was measured."""

    format_version: int = FORMAT_VERSION
    """Version of this format."""
    path: str
    """Where it was written. Empty: nowhere, since nothing was found."""
    machine: str
    """Processor, memory, GPUs."""
    environment: dict[str, Any] = Field({})
    """Device, threads, versions."""
    commit: str | None = None
    """Commit of flatout in a checkout, with + if files were changed."""
    began: str = ""
    """Date and time of the start."""
    wall_s: float
    """Seconds in total."""
    num_trials: int
    """Trials that ended."""
    complete: bool = True
    """False after an interruption."""
    ended_by_signal: int | None = None
    """The signal that interrupted it: 2 for Ctrl+C, 15 for SIGTERM. Null for none."""
    notes: list[str] = Field([])
    """What else to know, and what to do next."""

    @property
    def exit_code(self) -> int:
        """130 or 143 after an interruption, even though there are results."""
        return 0 if self.ended_by_signal is None else 128 + self.ended_by_signal

    @property
    def ended(self) -> str:
        """The first words of what is shown after an interruption."""
        return "" if self.complete else "Interrupted. These are the results so far.\n"

    @property
    def trials(self) -> str:
        """How many trials there were, and how long they took."""
        return f"{counted(self.num_trials, 'trial')} in {duration(self.wall_s)}"


def facts_of(race: Race) -> dict[str, Any]:
    """Return the fields of a result about where it was measured, and how its race ended."""
    environment = next((one.result.environment for one in race.done if one.result.is_ok), {})
    return {
        "machine": probe().describe(),
        "environment": {name: environment.get(name) for name in ("torch", "threads", "device")},
        "commit": commit_of_package(),
        "began": race.began,
        "wall_s": round(race.spent_s, 1),
        "num_trials": len(race.done),
        "ended_by_signal": race.ended_by_signal,
        "complete": race.ended_by_signal is None,
    }


class Bench(Measurement):
    """The measured rates and gains: the fields of bench.json.

    The directory `path` also has table.md.
    """

    recipe: str
    """Name of the recipe."""
    kind: str
    """ablation, or the key that was swept."""
    config: dict[str, Any]
    """The requested configuration."""
    minutes: float | None
    """The time limit."""
    repeats: int
    """Rounds that were started."""
    rows: list[Row]
    """The lines of the table."""
    total: Figure | None = None
    """Speed of the full set relative to the baseline. Null in a sweep, or without results."""
    total_speedup: float | None = None
    """The median of `total`."""

    def display(self) -> Display:
        """Return the total, the tables and how it was measured."""
        measured = [row for row in self.rows if row.status != "not-measured"]
        tables = [
            table_of(rows, heading)
            for kinds, heading in HEADINGS.items()
            if (rows := [row for row in measured if row.kind in kinds])
        ]
        absent = [(row.name, str(row.reason)) for row in self.rows if row.kind == "absent"]
        if absent and self.complete:
            tables.append(Table([Column("speedup"), Column("why")], absent, "Not measured"))
        what = "ablation" if self.kind == "ablation" else f"a sweep of {self.kind}"
        head = f"{self.ended}{self.recipe}: {what}."
        total = self.total
        if total:
            times = f"is {total.median:.2f} times as fast as the baseline{total.between()}"
            rare = "was measured too few times to compare it with the baseline"
            head += f" The full set {rare if total.low is None else times}."
        return Display(head, (), tables, self.notes)


def changes_table(rows: Sequence[Row]) -> list[Table]:
    """Return the table of what was measured, the winners first, each with a plus."""
    ranked = sorted(rows, key=lambda row: not row.taken and 1 / (row.first_gain or 1e-9))
    return [table_of(ranked)] if ranked else []


def late_ones(left: Sequence[Row], each_s: float = 0.0) -> list[str]:
    """Return the note on what there was no time for, and how long that takes if it is known."""
    late = [row.name for row in left if "time was up" in str(row.reason)]
    long = f", about {duration(len(late) * each_s)}" * bool(each_s)
    return [f"There was not enough time for {shortened(late)}{long}. Add --minutes."] * bool(late)


class Tuning(Measurement):
    """The fastest setting, which the recipe `path` states, and everything that was measured."""

    recipe: str
    """Name of the recipe."""
    tokens_per_step: int
    """Tokens per optimizer step, the same in every trial."""
    best: Row
    """The setting that was found. Its gain is over the first setting, null for that one."""
    precision: str
    """Its precision of the matmuls."""
    changes: list[Row]
    """Every change that was measured, in order."""
    not_tried: list[Row] = Field([])
    """Changes that were not measured, with the reasons."""

    def display(self) -> Display:
        """Return the gain in all, and what each choice gained."""
        best, gain = self.best, ""
        rate = f"{best.tokens_per_s.median:,.0f} tokens/s" if best.tokens_per_s else "no rate"
        if best.gain:
            gain = f"; gain over auto: {best.gain.gain()}"
        elif not any(row.taken for row in self.changes):
            gain = ": nothing that was measured is faster than auto"
            if not self.changes:
                gain = " as auto chooses: nothing else was measured"
        peak = "" if best.peak_gib is None else f"; peak {best.peak_gib:.2f} GiB"
        about = [f"Recipe {self.recipe}", self.machine, f"torch {self.environment.get('torch')}"]
        about += [f"commit {self.commit}"] if self.commit else []
        head = f"{self.ended}{'; '.join(about)}.\n{rate}{gain}{peak}."
        return Display(head, (), changes_table(self.changes), self.notes)


class ScriptTuning(Measurement):
    """What makes a script faster, and the patch that does it."""

    command: list[str]
    """The script's command."""
    root: str = ""
    """The directory in which the patch applies, if that is not the one of the command."""
    verdict: str
    """What `diagnose` finds in the unchanged script."""
    step_ms: float | None
    """Time of an unchanged step."""
    steps: int
    """Steps of a trial."""
    changes: list[Row]
    """The measured changes, in order."""
    not_tried: list[Row]
    """Changes that were not measured, and why."""
    taken: list[str]
    """The winners, in the order in which they were added."""
    gain: Figure | None = None
    """How many times faster the patched script is, with what is `by_hand`. None without winners."""
    gain_losses: LossCheck | None = None
    """The losses with all winners."""
    patch: str = ""
    """The winners as a unified diff. "" means none."""
    by_hand: list[ByHand] = Field([])
    """What to write where no exact edit is possible."""
    options: list[str] = Field([])
    """Words to add to the command, for what is an option of the script or becomes one."""
    withheld: str | None = None
    """Why no patch is given, although there are winners."""

    def display(self) -> Display:
        """Return what `diagnose` finds, the table, the patch, and how to use both."""
        head = f"{self.ended}{self.verdict}"
        return Display(head, (), changes_table(self.changes), self.notes)
