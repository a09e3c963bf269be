"""Tables of throughput.py: medians with their spread, best batches, a verdict per target."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughput_entries import ENTRIES, TARGET_GPU, TARGET_TFLOPS, TARGETS, WORKS, Entry, Target

NEAR = 0.97
"""A batch within this share of the best is measured again, since the first round may mislead."""

Row = dict[str, Any]


@dataclass
class Measurements:
    """All rows of a results file."""

    rows: list[Row]
    tiny: bool

    def of(self, entry: Entry) -> list[Row]:
        """Return the rows of an entry."""
        return [row for row in self.rows if (row["work"], row["entry"]) == (entry.work, entry.name)]

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows."""
        gone = {id(row) for row in rows}
        self.rows = [row for row in self.rows if id(row) not in gone]


def read_document(path: Path, *keys: str) -> dict[str, Any]:
    """Return the object in a results file, which has at least these keys.

    Raises: SystemExit when the file is damaged; the file is not changed.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # neither JSON nor text
        found = None
    if not isinstance(found, dict) or not set(keys) <= found.keys():
        raise SystemExit(
            f"{path} is damaged, and was not changed. Fix: restore an intact copy, or give another"
            " folder for the results."
        )
    return found


@dataclass(frozen=True)
class Best:
    """An entry at its best batch."""

    entry: Entry
    rows: list[Row]
    """Its measurements at that batch, one per round."""

    @property
    def tokens_per_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(row["tokens_per_s"] for row in self.rows)

    @property
    def peak_gib(self) -> float:
        """Maximum over the rounds."""
        return max(float(row["peak_gib"]) for row in self.rows)


def by_batch(found: Measurements, entry: Entry) -> dict[int | None, list[Row]]:
    """Return the successful rows of an entry by batch."""
    batches: dict[int | None, list[Row]] = {}
    for row in found.of(entry):
        if row["status"] == "ok":
            batches.setdefault(row["rows"], []).append(row)
    return batches


def best_rows(found: Measurements, entry: Entry) -> list[int | None]:
    """Return the batches worth another round."""
    medians = {
        rows: statistics.median(row["tokens_per_s"] for row in group)
        for rows, group in by_batch(found, entry).items()
    }
    return [rows for rows, median in medians.items() if median >= NEAR * max(medians.values())]


def best(
    found: Measurements, entry: Entry, *, rows: int | None = None, most_gib: float | None = None
) -> Best | None:
    """Return an entry at its best batch, or None without figures.

    `rows` selects a batch, `most_gib` limits the memory.
    """
    groups = [
        Best(entry, group)
        for batch, group in by_batch(found, entry).items()
        if rows is None or batch == rows
    ]
    fitting = [group for group in groups if most_gib is None or group.peak_gib <= most_gib]
    return max(fitting, key=lambda group: group.tokens_per_s, default=None)


def best_of_ours(found: Measurements, target: Target) -> Best | None:
    """Return the fastest flatout entry for a target, or the leanest for a memory target."""
    ours = [
        entry
        for entry in ENTRIES
        if (entry.work, entry.variant, entry.role) == (target.work, target.variant, "ours")
    ]
    candidates = [
        made
        for entry in ours
        if (made := best(found, entry, rows=target.rows, most_gib=target.most_gib))
    ]
    if target.what == "peak_gib":
        return min(candidates, key=lambda made: made.peak_gib, default=None)
    return max(candidates, key=lambda made: made.tokens_per_s, default=None)


def ratio(ours: Best, theirs: Best) -> tuple[float, float, float]:
    """Return (median, low, high) of ours over theirs, from common rounds if any, else medians."""
    rates = {row["round"]: row["tokens_per_s"] for row in theirs.rows}
    ratios = [
        row["tokens_per_s"] / rates[row["round"]] for row in ours.rows if row["round"] in rates
    ]
    ratios = ratios or [ours.tokens_per_s / theirs.tokens_per_s]
    return statistics.median(ratios), min(ratios), max(ratios)


def verdicts(found: Measurements) -> list[Row]:
    """Return every target with its measurement."""
    return [verdict(found, target) for target in TARGETS]


def verdict(found: Measurements, target: Target) -> Row:
    """Return a target, its measurement, the entry, and whether the target is kept.

    `kept` is None without a figure, or when it comes from another GPU. `per_tflops` compares GPUs:
    our rate over the target's, each divided by the matmul rate of its GPU.
    """
    ours = best_of_ours(found, target)
    theirs = None if target.against is None else best(found, entry_against(target))
    measured: float | None = None
    if ours is not None and target.against is not None:
        measured = None if theirs is None else ratio(ours, theirs)[0]
    elif ours is not None:
        measured = ours.peak_gib if target.what == "peak_gib" else ours.tokens_per_s
    device = None if ours is None else ours.rows[0]["device"]
    judged_on = measured if device == TARGET_GPU else None
    return {
        "work": target.work,
        "what": wanted(target) + (f", batch {theirs.rows[0]['rows']}" if theirs else ""),
        "least": target.least,
        "aim": target.aim,
        "predicted": target.predicted,
        "measured": measured,
        "device": device,
        "per_tflops": (
            None if ours is None or target.what != "tokens_per_s" else per_tflops(ours, target)
        ),
        "by": (
            None
            if measured is None or ours is None
            else f"{ours.entry.name}, batch {ours.rows[0]['rows'] or 'of the recipe'}"
        ),
        "kept": (
            None
            if judged_on is None or target.least is None
            else reaches(judged_on, target.least, target)
        ),
        "aim_reached": (
            None
            if judged_on is None or target.aim is None
            else reaches(judged_on, target.aim, target)
        ),
    }


def per_tflops(ours: Best, target: Target) -> float:
    """Return our rate over the target's, each per TFLOP/s of its GPU's matmul rate."""
    roof_tflops = statistics.median(row["roof_tflops"] for row in ours.rows)
    wanted_rate = target.least or target.aim or math.nan
    return (ours.tokens_per_s / roof_tflops) / (wanted_rate / TARGET_TFLOPS)


def entry_against(target: Target) -> Entry:
    """Return the baseline of a `times` target."""
    return next(
        entry for entry in ENTRIES if (entry.work, entry.name) == (target.work, target.against)
    )


def reaches(measured: float, wanted_figure: float, target: Target) -> bool:
    """Return whether a figure meets its target: memory at most, all else at least."""
    return measured <= wanted_figure if target.what == "peak_gib" else measured >= wanted_figure


def wanted(target: Target) -> str:
    """Return the description of a target."""
    within = f", within {target.most_gib:g} GiB" if target.most_gib else ""
    if target.what == "times":
        return f"times as fast as {entry_against(target).title}{within}"
    what = "GiB, at most" if target.what == "peak_gib" else "tokens/s"
    return what + (f", batch {target.rows}" if target.rows else "") + within


def table(found: Measurements) -> str:
    """Return the figures as Markdown: targets first, then every entry."""
    lines = (
        ["Toy shapes: they show that every entry runs and say nothing about speed.", ""]
        if found.tiny
        else []
    )
    lines += [
        f"| workload | target on one {TARGET_GPU} | at least | aim | predicted | measured | by | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    titles = {work.name: work.title for work in WORKS}
    for row in verdicts(found):
        figures = " | ".join(
            [
                figure(row["least"]),
                figure(row["aim"]),
                span(row["predicted"]),
                figure(row["measured"]),
            ]
        )
        lines.append(
            f"| {titles[row['work']]} | {row['what']} | {figures} | {row['by'] or ''} |"
            f" {judged(row, tiny=found.tiny)} |"
        )
    for work in WORKS:
        shown = [
            line
            for entry in ENTRIES
            if entry.work == work.name
            for line in entry_lines(found, entry)
        ]
        if shown:
            lines += [
                "",
                f"**{work.title}**",
                "",
                "| | batch | tokens/s | MFU | GiB | rounds |",
                "|---|---|---|---|---|---|",
                *shown,
            ]
    return "\n".join([*lines, "", *circumstances(found)]) + "\n"


def judged(row: Row, *, tiny: bool) -> str:
    """Return the verdict on a target and its aim.

    Toy shapes get none. Rates of other GPUs are given in proportion to their matmul rate.
    """
    if tiny or row["measured"] is None:
        return "not judged" if tiny else "not measured"
    if row["device"] != TARGET_GPU:
        share = (
            ""
            if row["per_tflops"] is None
            else f"; per TFLOP/s of matrix products {row['per_tflops']:.2f} of it"
        )
        return f"not judged: the target is for an {TARGET_GPU}, this is the {row['device']}{share}"
    verdict_words = [] if row["kept"] is None else ["kept" if row["kept"] else "**missed**"]
    return ", ".join(
        [
            *verdict_words,
            *(
                []
                if row["aim_reached"] is None
                else ["aim reached" if row["aim_reached"] else "aim not reached"]
            ),
        ]
    )


def figure(value: float | None) -> str:
    """Return a number with at least three digits, or an empty string for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.4g}"


def span(values: Sequence[float] | None) -> str:
    """Return a range, or one number if both ends are equal; an empty string for None."""
    return "" if values is None else " to ".join(dict.fromkeys(map(figure, values)))


def entry_lines(found: Measurements, entry: Entry) -> list[str]:
    """Return a line per measured batch, the best one in bold."""
    groups = by_batch(found, entry)
    top = best(found, entry)
    lines = []
    for batch in dict.fromkeys(row["rows"] for row in found.of(entry)):
        shown = batch or "the recipe's"
        if batch not in groups:
            failed = next(row for row in found.of(entry) if row["rows"] == batch)
            lines.append(
                f"| {entry.title} | {shown} | {failed['status']}:"
                f" {failed['reason'].replace('|', '/')} | | | 0 |"
            )
            continue
        group = groups[batch]
        title = title_of(entry, group[0])
        rate = spread([row["tokens_per_s"] for row in group])
        rate = f"**{rate}**" if top is not None and batch == top.rows[0]["rows"] else rate
        share = statistics.median(row["mfu"] for row in group)
        lines.append(
            f"| {title} | {shown} | {rate} | {100 * share:.1f}% |"
            f" {max(row['peak_gib'] for row in group):.1f} | {len(group)} |"
        )
    return lines


def title_of(entry: Entry, row: Row) -> str:
    """Return an entry's title with the added speedups that were active."""
    on = [added for added in entry.adds if added in row["speedups"]]
    return f"{entry.title}, with {', '.join(on)}" if on and entry.role == "ours" else entry.title


def spread(values: Sequence[float]) -> str:
    """Return the median, with the minimum and maximum if there are several values."""
    median = f"{statistics.median(values):,.0f}"
    return median if len(values) == 1 else f"{median} ({min(values):,.0f} to {max(values):,.0f})"


def circumstances(found: Measurements) -> list[str]:
    """Return how the figures were measured."""
    measured = [row for row in found.rows if row["status"] == "ok"]
    if not measured:
        return ["Nothing has been measured yet."]
    machines, torches, commits = (
        ", ".join(sorted({str(row[key]) for row in measured}))
        for key in ("machine", "torch", "commit")
    )
    roofs = [row["roof_tflops"] for row in measured]
    steps = len(measured[0]["steps_ms"])
    return [
        f"{machines}; torch {torches}; commit {commits or 'not known'}. A measurement is the median"
        f" of {steps} steps in its own process; medians over the rounds (smallest to largest); the"
        " best batch of an entry in bold; ratios within a round. GiB is the peak that was"
        " allocated. MFU counts 6 N_matmul + 6 L T d FLOPs per token against the matmul rate"
        f" measured in the same process, here {min(roofs):,.4g} to {max(roofs):,.4g} TFLOP/s. Every"
        " loss was finite and fell by at least 1%. `python benchmarks/throughput.py`."
    ]


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
