"""What `flatout bench` and `flatout tune` found, and how it is shown. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from flatout.display import Column, Display, Show, Table, duration, table_of
from flatout.errors import in_shell
from flatout.measure.race import (
    INTERRUPTED,
    TIME_WAS_UP,
    Figure,
    LossCheck,
    Race,
    Setting,
    figure_of,
    spread,
)
from flatout.measure.scripts.patch import ByHand
from flatout.measure.trial import Result as TrialResult
from flatout.progress import counted
from flatout.storage.files import Stored
from flatout.storage.json_io import Result

FORMAT_VERSION = 4
PARTS = ("batch", "checkpointing", "speedups", "prefetch")
"""What `flatout tune` varies. The order is that of the first measurements."""
NO_TIME = "not measured: the time was up before its turn."
UNPROVEN = "not proven"
"""Starts the reason of a change that was faster, and not often enough to be sure."""
HEADINGS = {
    ("baseline", "added"): "Add one: each speedup on top of the previous ones",
    ("leave-one-out",): "Leave one out: what each speedup is worth in the full set",
    ("add-one",): "Add one to the full set: speedups that are off by default",
    ("point",): "",
}
"""The kinds of rows in each table of a bench, and its title."""
MOST_NAMED = 5
"""Written files that are named."""
APART = 1.25
"""Ratio from which the product of the gains and the whole gain contradict each other."""
FILE, SUMMARY_FILE = "tuning.json", "changes.txt"
"""Of a tuned script: the name of the result, and of its summary beside the records with the
changes."""
MEDIANS = ("data_ms", "host_ms", "device_ms", "compile_s")
"""Fields of a row that are medians of its trials."""


def rate_text(row: Row) -> str:
    """Return a row's tokens per second, or why it has none."""
    if row.tokens_per_s is None:
        prefix = {"timed-out": "took too long: ", "failed": "failed: "}.get(row.status, "")
        return f"{prefix}{row.reason or ''}"
    return f"{row.tokens_per_s.median:,.0f}{row.tokens_per_s.between(',.0f')}"


def gain_text(row: Row) -> str:
    """Return what a row gained, in words."""
    if row.verdict or row.gain is None:
        return row.verdict
    if row.kind == "leave-one-out":
        return row.gain.gain("worth nothing measurable", "worth ", "faster without it, ")
    return row.gain.gain()


def step_text(row: Row) -> str:
    """Return the time of a step and its parts, with about three digits."""
    if row.step_ms is None:
        return ""
    parts = (row.step_ms, row.data_ms, row.host_ms, row.device_ms)
    step, *rest = (
        "?" if ms is None or math.isnan(ms) else f"{ms:.{0 if ms >= 100 else 1 if ms >= 1 else 2}f}"
        for ms in parts
    )
    return f"{step} = {' + '.join(rest)}"


class Row(LossCheck):
    """What was measured about a set of speedups, a setting, or a change, or why it was not."""

    model_config = ConfigDict(frozen=False)

    name: Annotated[str, Show()]
    """Name of the set, the setting or the change."""
    kind: str = "change"
    """baseline, added, leave-one-out or add-one (of a bench); point (of a sweep); change or best
    (of tune); absent (not measured)."""
    does: str = ""
    """What a change does, in a few words."""
    speedup: str | None = None
    """The speedup that it measures."""
    speedups: list[str] = Field([])
    """All speedups that were on."""
    leaves_out: bool = False
    """Whether a change removes the speedup. `gain` is that of removing it."""
    against: str | None = None
    """What it is compared with."""
    status: str = "ok"
    """ok, out-of-memory, failed, timed-out or not-measured."""
    reason: str | None = None
    """Why it is not ok, or why it was not taken."""
    tokens_per_s: Annotated[Figure | None, Show("tokens/s", record=rate_text)] = None
    """Tokens per second of measured steps."""
    gain: Annotated[Figure | None, Show("gain", record=gain_text)] = None
    """How many times faster, from paired repeats. For a row of a bench that leaves a speedup out,
    how many times faster with it."""
    first_gain: float | None = None
    """The ratio of its first trial to those beside it, which only orders changes."""
    verdict: str = ""
    """The gain in words, or why there is none."""
    taken: bool = False
    """Whether it is one of the winners."""
    step_ms: Annotated[
        float | None, Show("step = data + host + device, ms", record=step_text, align="right")
    ] = None
    """Mean time of a measured step."""
    data_ms: float | None = None
    """Part of it spent waiting for data."""
    host_ms: float | None = None
    """Part of it spent on the host's work. On a GPU it overlaps with the device's."""
    device_ms: float | None = None
    """Part of it spent on the device's work."""
    rows_per_device: Annotated[
        int | None,
        Show("rows", record=lambda r: f"{r.rows_per_device} x {r.accumulate}" * bool(r.accumulate)),
    ] = None
    """Sequences in a micro-batch."""
    accumulate: int | None = None
    """Micro-batches per step."""
    peak_gib: Annotated[float | None, Show("GiB", ".2f", unknown="")] = None
    """Peak memory: of the device, or on a CPU of the process."""
    compile_s: float | None = None
    """Seconds spent compiling, once per start. Null when nothing was compiled."""
    losses: Annotated[None, Show("losses", record=LossCheck.words)] = Field(None, exclude=True)
    repeats: Annotated[int, Show("n", lambda n: str(n or ""))] = 0
    """Trials with results."""


class Left(Stored):
    """A speedup or a change that is not measured."""

    name: Annotated[str, Show()]
    reason: Annotated[str, Show()]
    """Why, as a sentence."""


def measured(row: Row, race: Race[Setting], setting: Setting) -> Row:
    """Return a row with the results of a setting, or the reason why there are none."""
    results, failed = race.results(setting), race.failure(setting)
    if not results:
        status, reason = "not-measured", f"not measured: {race.stopped_by} before its turn."
        if failed:
            status, reason = failed.status, str(failed.reason)
        return row.model_copy(update={"status": status, "reason": row.reason or reason})
    rates = {
        each: [rate for one in race.results(each) if (rate := rate_of(one))]
        for each in dict.fromkeys(one.setting for one in race.done)
    }
    facts: dict[str, Any] = {
        "repeats": len(results),
        "step_ms": statistics.median(result.step_ms for result in results),
        "peak_gib": max((one.peak_gib for one in results if one.peak_gib), default=None),
        "rows_per_device": results[0].rows_per_device,
        "accumulate": results[0].accumulate,
    }
    if rates[setting]:
        facts["tokens_per_s"] = figure_of(rates[setting], spread([*rates.values()]))
    for name in MEDIANS:
        values = [value for one in results if (value := getattr(one, name)) is not None]
        facts[name] = statistics.median(values) if values else None
    if failed:
        facts["reason"] = row.reason or f"{failed.status} in one repeat: {failed.reason}"
    return row.model_copy(update=facts)


def rate_of(result: TrialResult) -> float | None:
    """Return the tokens per second of a trial of a recipe."""
    return result.tokens_per_step and 1e3 * result.tokens_per_step / result.step_ms


class Measurement(Result):
    """What an experiment found, and how it was measured."""

    format_version: int = FORMAT_VERSION
    """Version of this format."""
    path: str
    """Where it was written."""
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

    @property
    def exit_code(self) -> int:
        """130 or 143 after an interruption, even though there are results."""
        return 0 if self.ended_by_signal is None else 128 + self.ended_by_signal

    @property
    def ended(self) -> str:
        """The first line of what is shown after an interruption."""
        return "" if self.complete else "Interrupted. These are the results so far.\n"

    def trials(self) -> str:
        """Return how many trials there were, and how long they took."""
        return f"{counted(self.num_trials, 'trial')} in {duration(self.wall_s)}"


class Bench(Measurement):
    """The measured rates and gains: the fields of bench.json.

    The directory `path` also has table.md, and trials.jsonl with every trial.
    """

    recipe: str
    """Name of the recipe."""
    kind: str
    """ablation, or the setting that was swept."""
    config: dict[str, Any]
    """The requested configuration."""
    config_digest: str
    """Its SHA-256."""
    minutes: float | None
    """The time limit."""
    repeats: int
    """Rounds that were started."""
    notes: list[str]
    """Notes for the reader on how the results were measured."""
    rows: list[Row]
    """The lines of the table."""
    total: Figure | None = None
    """Speed of the full set relative to the baseline. Null in a sweep, or without results."""
    total_speedup: float | None = None
    """The median of `total`."""

    def display(self) -> Display:
        """Return the tables, the total and how it was measured."""
        tables = []
        for kinds, heading in HEADINGS.items():
            rows = [r for r in self.rows if r.kind in kinds and r.status != "not-measured"]
            if rows:
                tables.append(table_of(rows, heading))
        absent = [r for r in self.rows if r.kind == "absent"]
        if absent:
            left = [Left(name=row.name, reason=str(row.reason)) for row in absent]
            tables.append(table_of(left, "Not measured"))
        late = [r.name for r in self.rows if r.status == "not-measured" and r.kind != "absent"]
        why = TIME_WAS_UP if self.complete else INTERRUPTED
        notes = [f"Not measured, {why}: {', '.join(late)}."] if late else []
        what = "ablation" if self.kind == "ablation" else f"a sweep of {self.kind}"
        head = f"{self.recipe}: {what}. {self._total()}".strip()
        files = f"{self.path}/ has table.md, bench.json and trials.jsonl; {self.trials()}"
        return Display(head, (), tables, [*notes, *self.notes, self._setting(), files])

    def _total(self) -> str:
        """Return the total speedup as a sentence, or an empty string."""
        total = self.total
        if total is None:
            return ""
        if total.low is None or total.high is None:
            return f"The gain of the full set over the baseline is {total.gain()}."
        times = f"{total.median:.2f} times as fast as"
        how = "not measurably faster than" if total.low <= 1 <= total.high else times
        return f"The full set is {how} the baseline{total.between()}."

    def _setting(self) -> str:
        """Return where and how the results were measured, in one line."""
        versions = {name: self.environment.get(name) for name in ("torch", "threads")}
        facts = [
            self.machine,
            *(f"{name} {value}" for name, value in versions.items() if value is not None),
            f"{counted(self.repeats, 'interleaved round')}, each trial in its own process",
            "medians with 94% intervals",
            "gains are medians of the ratios within rounds" if self.kind == "ablation" else "",
            f"commit {self.commit}" if self.commit else "",
            self.began,
        ]
        return "; ".join(filter(None, facts)) + "."


def change_text(row: Row) -> str:
    """Return what a change gained, its losses and what it costs, or why it was not taken."""
    parts = [row.gain.times()] if row.gain else []
    if row.gain is None and row.first_gain:
        parts.append(f"{row.first_gain:.2f} times as fast in one trial")
    parts += [row.reason] if row.reason else []
    parts += [f"losses {row.words()}"] if row.within_tolerance is not None else []
    parts += [f"compiles for {row.compile_s:.0f} s"] if row.compile_s else []
    parts += [f"peak {row.peak_gib:.2f} GiB"] if row.peak_gib else []
    return "; ".join(parts)


def changes_table(rows: Sequence[Row]) -> list[Table]:
    """Return the table of what was measured, the winners first, each with a plus."""
    winners = [row for row in rows if row.taken]
    others = sorted(
        (row for row in rows if not row.taken), key=lambda row: -(row.first_gain or 0.0)
    )
    cells = [("+" if row.taken else "", row.name, change_text(row)) for row in (*winners, *others)]
    return [Table([Column(""), Column(""), Column("")], cells)] if cells else []


class Tuning(Measurement):
    """The fastest setting, which the recipe `path` states, and everything that was measured."""

    recipe: str
    """Name of the recipe."""
    tokens_per_step: int
    """Tokens per optimizer step, the same in every trial."""
    start: str
    """The setting that everything was compared with: auto, unless that failed."""
    best: Row
    """The setting that was found. Its gain is over the first setting, null for that one."""
    prefetch: int
    """Its optimizer steps that the data loader reads ahead."""
    precision: str
    """Its precision of the matmuls."""
    is_rehearsed: bool
    """Whether a trial has evaluated and saved with it."""
    changes: list[Row]
    """Every change that was measured, in order."""
    not_tried: list[Left] = Field([])
    """Changes that were not measured, with the reasons."""

    def found(self) -> Display:
        """Return the comments of tuned.yaml: what each choice gained."""
        torch = self.environment.get("torch", "unknown")
        commit = f"; commit {self.commit}" if self.commit else ""
        notes = ["Rehearsed with it: an evaluation and a save."]
        if not self.is_rehearsed:
            notes = ["No evaluation and save was rehearsed: the time was up."]
        late = sum(each.reason == NO_TIME for each in self.not_tried)
        if late:
            notes.append(f"There was not enough time for {counted(late, 'other')}. Add --minutes.")
        head = f"Recipe {self.recipe}; {self.machine}; torch {torch}{commit}.\n{self._total()}"
        return Display(head, (), changes_table(self.changes), notes)

    def display(self) -> Display:
        """Return what each choice gained, and the command that trains the recipe."""
        shown = self.found()
        command = f"train it with: flatout train {in_shell(self.path)}"
        notes = [*shown.notes, f"{self.trials()}; {command}"]
        return Display(f"{self.ended}{shown.headline}", (), shown.tables, notes)

    def _total(self) -> str:
        """Return the rate of the best setting, and its gain, as a sentence."""
        best = self.best
        rate = f"{best.tokens_per_s.median:,.0f} tokens/s" if best.tokens_per_s else "no rate"
        gain = f"; gain over {self.start}: {gain_text(best)}" if best.gain else ""
        peak = "" if best.peak_gib is None else f"; peak {best.peak_gib:.2f} GiB"
        if best.name == self.start:
            gain = f": nothing that was measured is faster than {self.start}"
            if not self.changes:
                gain = f" as {self.start} chooses: nothing else was measured"
        return f"{rate}{gain}{peak}."


class ScriptTuning(Measurement):
    """What makes a script faster, and the patch that does it."""

    command: list[str]
    """The script's command."""
    verdict: str
    """What `diagnose` finds in the unchanged script."""
    step_ms: float | None
    """Time of an unchanged step."""
    steps: int
    """Steps of a trial."""
    changes: list[Row]
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

    def display(self) -> Display:
        """Return the table, the patch, and how to use both."""
        notes = [self.total()]
        if self.loss_noise:
            noise = f"Two runs of the unchanged script differ by up to {self.loss_noise:.0e} in"
            notes.append(f"{noise} their losses.")
        late = [one.name for one in self.not_tried if one.reason == NO_TIME]
        if late:
            notes.append(f"There was not enough time for {', '.join(late)}. Add --minutes.")
        notes += [self.withheld] if self.withheld else []
        if self.patch:
            proof = f"The patched script: {self.verified.times()}." if self.verified else ""
            notes += ["", self.patch.rstrip(), "", proof]
            notes.append(f"Apply it: git apply {in_shell(self.path)}/changes.patch")
        for one in self.by_hand:
            where = f"{one.file}:{one.line}: " if one.file else ""
            notes.append(f"By hand, {one.change}: {where}{one.words}")
        if self.taken:
            command = " ".join(map(in_shell, self.command))
            notes.append(f"Without editing: flatout run --with {','.join(self.taken)} -- {command}")
        if self.written:
            names = ", ".join(self.written[:MOST_NAMED])
            notes.append(f"The script wrote {names} in the copy of this directory alone.")
        if self.written_outside:
            notes.append(f"The script also wrote {', '.join(self.written_outside)}.")
        notes.append(f"{self.trials()}; {self.path}/")
        return Display(f"{self.ended}{self.verdict}", (), changes_table(self.changes), notes)

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
        kept = self.gain_losses and self.gain_losses.words()
        text = f"Together: {self.gain.times()}{f'; losses {kept}' if kept else ''}."
        has_all = all(row.gain for row in self.changes if row.taken)
        if has_all and not 1 / APART < product / self.gain.median < APART:
            text += (
                f" The single gains multiply to {product:.2f}: what else runs here changes them."
            )
        return text
