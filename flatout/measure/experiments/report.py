"""What `flatout bench` and `flatout tune` found: JSON, Markdown, text and a picture. No torch."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from pydantic import Field

from flatout.display import duration
from flatout.errors import in_shell
from flatout.measure.experiments.records import (
    INTERRUPTED,
    TIME_WAS_UP,
    UNSURE,
    Best,
    Choice,
    Figure,
    Left,
    Row,
    Trial,
)
from flatout.progress import counted
from flatout.storage.json_io import Result
from flatout.storage.streams import can_show

FORMAT_VERSION = 3
NO_TIME = "not measured: the time was up before its turn."
HEADINGS = {
    ("baseline", "added"): "Add one: each speedup on top of the previous ones",
    ("leave-one-out",): "Leave one out: what each speedup is worth in the full set",
    ("add-one",): "Add one to the full set: speedups that are off by default",
    ("point",): "",
    ("absent",): "Not measured",
}
"""The kinds of rows in each group, and the heading of the group."""
COLUMNS = (
    "",
    "tokens/s",
    "gain",
    "step = data + host + device, ms",
    "rows x accumulations",
    "GiB",
    "losses",
    "n",
)
FULL = "█"
BAR_COLUMNS, PICTURE_COLUMNS, NAME_COLUMNS = 28, 120, 40


class Measurement(Result):
    """What an experiment found, and how it was measured."""

    format_version: int = FORMAT_VERSION
    """Version of this format."""
    path: str
    """Where it was written."""
    recipe: str
    """Name of the recipe."""
    machine: str
    """Processor, memory, GPUs."""
    environment: dict[str, str | int]
    """Device, threads, versions."""
    commit: str | None
    """Commit of flatout in a checkout, with + if files were changed."""
    began: str
    """Date and time of the start."""
    wall_s: float
    """Seconds in total."""
    complete: bool = True
    """False after an interruption."""
    ended_by_signal: int | None = None
    """The signal that interrupted it: 2 for Ctrl+C, 15 for SIGTERM. Null for none."""
    trials: list[Trial]
    """Every trial: the point, the round, the seed and the results."""

    @property
    def exit_code(self) -> int:
        """130 or 143 after an interruption, even though there are results."""
        return 0 if self.ended_by_signal is None else 128 + self.ended_by_signal


class Bench(Measurement):
    """The measured rates and gains: the fields of bench.json.

    The directory `path` also has table.md, bench.svg and trials.jsonl.
    """

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
    total_speedup: float | None = None
    """Speed of the full set relative to the baseline.

    null in a sweep, or when one of the two has no results."""
    total_speedup_low: float | None = None
    """Lower end of its 94% interval. Null with too few repeats."""
    total_speedup_high: float | None = None
    """Upper end."""

    def summary(self) -> str:
        """Return the bars, and the paths of the files."""
        files = "table.md, bench.svg, bench.json, trials.jsonl"
        shown = self.bars(sys.stdout.encoding or "ascii")
        return f"{shown}\n\n{self.path}/  {files}; {duration(self.wall_s)}"

    def table(self) -> str:
        """Return the report as Markdown: its title, its tables, and how it was made."""
        lines = [f"# {self._title()}", ""]
        lines += [f"**{total}**", ""] if (total := self._total()) else []
        for heading, rows in self._groups():
            lines += [f"## {heading}", ""] if heading else []
            if rows[0].kind == "absent":
                lines += [f"- {row.name}: {row.reason}" for row in rows]
            else:
                lines += row_lines(rows)
            lines.append("")
        lines += [part for line in self._unreached() for part in (line, "")]
        setting = "; ".join(filter(None, (self._baseline(), self._setting())))
        lines += [setting, "", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"

    def bars(self, encoding: str = "utf-8") -> str:
        """Return the report for a terminal: one bar per row with its rate and its gain.

        Rows out of tolerance and unmeasured rows follow.
        """
        groups = self._groups()
        most = max((row.tokens_per_s.median for row in self.rows if row.tokens_per_s), default=1.0)
        width = max((len(row.short_name) for _, rows in groups for row in rows), default=0)
        full = FULL if can_show(FULL, encoding) else "#"
        lines, exceeded = [f"{self._title()}, tokens/s"], []
        for heading, rows in groups:
            lines += ["", heading] if heading else []
            for row in rows:
                shown, rate = f"{row.short_name:<{width}}  ", row.tokens_per_s
                if rate is None:
                    lines.append(shown + absence(row))
                    continue
                bar = full * max(round(BAR_COLUMNS * rate.median / most), 1)
                shown += f"{bar:<{BAR_COLUMNS}}  {rate.median:>11,.0f}  {gain_text(row)}".rstrip()
                if row.within_tolerance is False:
                    shown += "  OUT OF TOLERANCE"
                    why = f"{row.tolerance} tolerance exceeded: {row.tolerance_reason}"
                    exceeded.append(f"{row.short_name}: {why}")
                lines.append(shown)
        missing = self._unreached()
        lines += ["", *missing] if missing else []
        lines += ["", "Out of tolerance", *exceeded] if exceeded else []
        ends = self._total(), self._baseline().capitalize(), *self.notes
        return "\n".join([*lines, "", *filter(None, ends)]).strip()

    def picture(self) -> str:
        """Return the bars as SVG, without what cannot be measured. The background is its own."""
        from rich.console import Console
        from rich.text import Text

        measured = [row for row in self.rows if row.kind != "absent"]
        bars = self.model_copy(update={"rows": measured}).bars()
        console = Console(width=PICTURE_COLUMNS, file=io.StringIO(), record=True)
        text = Text(f"{bars}\n\n{self._setting()}")
        text.highlight_regex(f"{FULL}+", "bright_blue")
        text.highlight_regex("OUT OF TOLERANCE", "bold bright_red")
        console.print(text)
        return console.export_svg(title=self._title())

    def _groups(self) -> list[tuple[str, list[Row]]]:
        """Return the groups of rows, each with its heading.

        Empty groups are omitted, as are the rows that `_unreached` lists.
        """
        found = [
            (heading, [row for row in self.rows if row.kind in kinds and not row.is_unreached])
            for kinds, heading in HEADINGS.items()
        ]
        return [(heading, rows) for heading, rows in found if rows]

    def _unreached(self) -> list[str]:
        """Return the rows that the bench did not reach, and why, in at most one line."""
        late = [row for row in self.rows if row.is_unreached]
        why = INTERRUPTED if not self.complete else TIME_WAS_UP
        names = ", ".join(row.short_name for row in late)
        return [f"Not measured, {why}: {names}."] if late else []

    def _title(self) -> str:
        what = "ablation" if self.kind == "ablation" else f"a sweep of {self.kind}"
        return f"{self.recipe}: {what}"

    def _total(self) -> str:
        """Return the total speedup as a sentence, or an empty string."""
        median, low, high = self.total_speedup, self.total_speedup_low, self.total_speedup_high
        if median is None:
            return ""
        if low is None or high is None:
            return f"The gain of the full set over the baseline is {UNSURE}."
        between = Figure(median=median, low=low, high=high).between(".2f")
        if low <= 1 <= high:
            return f"The full set is not measurably faster than the baseline{between}."
        return f"The full set is {median:.2f} times as fast as the baseline{between}."

    def _baseline(self) -> str:
        """Return a description of an ablation's baseline, or an empty string without results."""
        rows = (row for row in self.rows if row.kind == "baseline" and row.rows_per_device)
        row = next(rows, None)
        if row is None:
            return ""
        return (
            "baseline: fp32, eager, an optimizer that loops over parameters, text tokenised in the "
            f"step, {row.rows_per_device} rows x {row.accumulate} accumulations"
        )

    def _setting(self) -> str:
        """Return where and how the results were measured, in one line."""
        versions = {name: self.environment.get(name) for name in ("torch", "threads")}
        facts = [
            self.machine,
            *(f"{name} {value}" for name, value in versions.items() if value is not None),
            f"{self.repeats} interleaved rounds, each trial in its own process",
            "medians with 94% intervals",
            "gains are medians of the ratios within rounds" if self.kind == "ablation" else "",
            f"commit {self.commit}" if self.commit else "",
            self.began,
        ]
        return "; ".join(filter(None, facts)) + "."


def row_lines(rows: Sequence[Row]) -> list[str]:
    """Return rows as a Markdown table. A row without results shows the reason."""
    is_sweep = rows[0].kind == "point"
    names = [name for name in COLUMNS if not (is_sweep and name in ("gain", "losses"))]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        rate = row.tokens_per_s
        cells = (row.name, absence(row), *[""] * 6)
        if rate is not None:
            cells = (
                row.name,
                f"{rate.median:,.0f}{rate.between(',.0f')}",
                gain_text(row),
                step_text(row),
                f"{row.rows_per_device} x {row.accumulate}",
                "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
                loss_text(row),
                str(row.repeats),
            )
        known = dict(zip(COLUMNS, cells, strict=True))
        lines.append(f"| {' | '.join(known[name].replace('|', '/') for name in names)} |")
    return lines + [
        f"\n{row.name}: {row.reason}" for row in rows if row.tokens_per_s and row.reason
    ]


def absence(row: Row) -> str:
    """Return why a row has no results."""
    prefix = {"timed-out": "took too long: ", "failed": "failed: "}.get(row.status, "")
    return f"{prefix}{row.reason}"


def gain_text(row: Row) -> str:
    """Return a row's gain: the verdict and its interval. In a sweep, the rate's and the memory."""
    if row.gain is not None:
        return f"{row.verdict}{row.gain.between('.2f')}"
    if row.kind == "point" and row.tokens_per_s:
        peak = "memory unknown" if row.peak_gib is None else f"{row.peak_gib:.2f} GiB"
        return f"{row.tokens_per_s.between(',.0f').strip()}  {peak}"
    if row.kind in {"baseline", "point"}:
        return ""
    return f"nothing to compare with{row.verdict and ': '}{row.verdict}"


def loss_text(row: Row) -> str:
    """Return how much the losses differ, and whether that is within the tolerance."""
    if row.tolerance is None:
        return ""
    apart = ""
    if row.loss_difference is not None:
        apart = f"{row.loss_difference:.0e} apart" if row.loss_difference else "equal"
    if row.compared_losses:
        how = " with train.deterministic" * row.deterministic
        apart = f"{apart} over {row.compared_losses}{how}"
    if row.within_tolerance is None:
        return ", ".join(filter(None, (apart, row.tolerance_reason)))
    if row.within_tolerance:
        return f"{apart}, within tolerance ({row.tolerance})"
    return f"**out of tolerance ({row.tolerance})**: {apart}; {row.tolerance_reason}"


def step_text(row: Row) -> str:
    """Return the time of a step and its parts, with about three digits. ? means not measured."""
    parts = (row.step_ms, row.data_ms, row.host_ms, row.device_ms)
    step, *rest = (
        "?" if ms is None else f"{ms:.{0 if ms >= 100 else 1 if ms >= 1 else 2}f}" for ms in parts
    )
    return f"{step} = {' + '.join(rest)}"


class Tuning(Measurement):
    """The fastest setting, which the recipe `path` states, and everything that was measured."""

    tokens_per_step: int
    """Tokens per optimizer step, the same in every trial."""
    start: str
    """The setting that everything was compared with: auto, unless that failed."""
    best: Best
    """The setting that was found."""
    choices: list[Choice]
    """Every change that was measured, in order."""
    not_tried: list[Left] = Field([])
    """Changes that were not measured, with the reasons."""
    text: list[str] = Field([])
    """The lines of the summary."""

    def summary(self) -> str:
        """Return what each choice gained, and the command that trains the recipe."""
        ended = "" if self.complete else "Interrupted. These are the results so far.\n\n"
        trials = f"{counted(len(self.trials), 'trial')} in {duration(self.wall_s)}"
        command = f"train it with: flatout train {in_shell(self.path)}"
        return f"{ended}{chr(10).join(self.lines())}\n\n{trials}; {command}"

    def lines(self) -> list[str]:
        """Return the comments of tuned.yaml: what each choice gained."""
        torch = self.environment.get("torch", "unknown")
        commit = f"; commit {self.commit}" if self.commit else ""
        lines = [f"Recipe {self.recipe}; {self.machine}; torch {torch}{commit}.", self._total()]
        lines.append(f"Rehearsed with it: {' and '.join(self.best.rehearsed) or 'nothing'}.")
        if "save" not in self.best.rehearsed:
            lines.append(
                "No save was rehearsed: the time was up, or the disk has too little space."
            )
        taken = {choice.name: choice for choice in self.choices if choice.taken}
        rest = {choice.name: choice for choice in self.choices if choice.name not in taken}
        for title, choices in (
            ("Taken, in this order. Each gain is over the setting before:", taken.values()),
            ("Measured and not taken:", rest.values()),
        ):
            width = min(max(map(len, (each.name for each in choices)), default=0), NAME_COLUMNS)
            lines += ["", title] if choices else []
            for each in choices:
                line = f"  {each.name:<{width}}  {choice_text(each)}"
                lines += wrap(line, PICTURE_COLUMNS, subsequent_indent=" " * (width + 4))
        late = sum(each.reason == NO_TIME for each in self.not_tried)
        if late:
            others = counted(late, "other")
            lines += ["", f"There was not enough time for {others}. Add --minutes."]
        return lines

    def _total(self) -> str:
        """Return the rate of the best setting, and its gain, as a sentence."""
        best = self.best
        rate = f"{best.tokens_per_s.median:,.0f} tokens/s" if best.tokens_per_s else "no rate"
        gain = f"; gain over {self.start}: {gain_text(best)}" if best.gain else ""
        peak = "" if best.peak_gib is None else f"; peak {best.peak_gib:.2f} GiB"
        if best.name == self.start:
            gain = f": nothing that was measured is faster than {self.start}"
            if not self.choices:
                gain = f" as {self.start} chooses: nothing else was measured"
        return f"{rate}{gain}{peak}."


def choice_text(choice: Choice) -> str:
    """Return what a change gained, or why it has no gain, and whether its losses are wrong."""
    text = choice.verdict if choice.gain is None else gain_text(choice)
    if choice.within_tolerance is False:
        text += f", but the losses exceed the tolerance ({choice.tolerance_reason})"
    return text
