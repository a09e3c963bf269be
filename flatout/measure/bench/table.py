"""A report as a Markdown table, and as bars in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.measure.trials.results import INTERRUPTED, TIME_WAS_UP, Report, Row
from flatout.measure.trials.statistics import Figure
from flatout.streams import can_show

HEADINGS = {
    ("baseline", "added"): "Add one: each speedup on top of the previous ones",
    ("left-out",): "Leave one out: what each speedup is worth in the full set",
    ("put-in",): "Add one to the full set: speedups that are off by default",
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
BAR_COLUMNS = 28


def groups(report: Report) -> list[tuple[str, list[Row]]]:
    """Return the report's groups of rows, each with its heading.

    Empty groups are left out, as are the rows that `unreached` lists.
    """
    found = [
        (heading, [row for row in report.rows if row.kind in kinds and not row.is_unreached])
        for kinds, heading in HEADINGS.items()
    ]
    return [(heading, rows) for heading, rows in found if rows]


def unreached(report: Report) -> list[str]:
    """Return the rows that the bench did not reach, one line per reason."""
    lines = []
    for why in (TIME_WAS_UP, INTERRUPTED):
        rows = [row for row in report.rows if row.is_unreached and why in str(row.reason)]
        if rows:
            lines.append(f"Not measured, {why}: {', '.join(row.short_name for row in rows)}.")
    return lines


def table(report: Report) -> str:
    """Return the report as Markdown: its title, its tables, and how it was made."""
    lines = [f"# {title(report)}", ""]
    if report.total_speedup is not None:
        lines += [f"**{total_text(report)}**", ""]
    for heading, rows in groups(report):
        if heading:
            lines += [f"## {heading}", ""]
        lines += (
            [f"- {row.name}: {row.reason}" for row in rows]
            if rows[0].kind == "absent"
            else row_lines(rows, sweep=rows[0].kind == "point")
        )
        lines.append("")
    lines += [part for line in unreached(report) for part in (line, "")]
    lines += [f"{setting(report)}", "", *[f"- {note}" for note in report.notes]]
    return "\n".join(lines).rstrip() + "\n"


def title(report: Report) -> str:
    """Return the title of a report."""
    return (
        f"{report.recipe}: the ladder"
        if report.kind == "ladder"
        else f"{report.recipe}: a sweep of {report.kind}"
    )


def total_text(report: Report) -> str:
    """Return the total speedup as a sentence, or an empty string."""
    figure = report.total_speedup
    if figure is None:
        return ""
    text = f"The full set is {figure.median:.2f} times as fast as the baseline"
    if figure.low is not None:
        return f"{text}{between(figure, '.2f')}."
    fewest = min(
        (row.repeats for row in report.rows if row.kind in {"baseline", "added"} and row.repeats),
        default=0,
    )
    return f"{text} ({'one repeat: too few' if fewest < 2 else 'too few repeats'} to be sure)."


def baseline_text(report: Report) -> str:
    """Return a description of a ladder's baseline, or an empty string if it has no figures."""
    row = next((row for row in report.rows if row.kind == "baseline" and row.rows_per_device), None)
    if row is None:
        return ""
    batch = f"{row.rows_per_device} rows x {row.accumulate} accumulations"
    return (
        "baseline: fp32, eager, an optimizer that loops over parameters, text tokenised in the "
        f"step, {batch}"
    )


def setting(report: Report) -> str:
    """Return where and how the figures were measured, in one line."""
    facts = [*filter(None, [baseline_text(report)]), report.machine]
    facts += [
        f"{name} {report.environment[name]}"
        for name in ("torch", "threads")
        if name in report.environment
    ]
    facts += [
        f"{report.repeats} interleaved rounds, each trial in its own process",
        "medians with 94% intervals",
    ]
    facts += ["gains are medians of the ratios within rounds"] if report.kind == "ladder" else []
    facts += [f"commit {report.commit}"] if report.commit else []
    return "; ".join([*facts, report.began]) + "."


def row_lines(rows: Sequence[Row], *, sweep: bool) -> list[str]:
    """Return rows as a Markdown table; a row without figures shows the reason."""
    names = [name for name in COLUMNS if not (sweep and name in ("gain", "losses"))]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        cells = row_cells(row)
        lines.append(f"| {' | '.join(cells.get(name, '').replace('|', '/') for name in names)} |")
    return lines + [
        f"\n{row.name}: {row.reason}" for row in rows if row.tokens_per_s is not None and row.reason
    ]


def row_cells(row: Row) -> dict[str, str]:
    """Return the cells of a row, by column."""
    if row.tokens_per_s is None:
        return {"": row.name, "tokens/s": absence(row)}
    rate = f"{row.tokens_per_s.median:,.0f}{between(row.tokens_per_s, ',.0f')}"
    batch = f"{row.rows_per_device} x {row.accumulate}"
    memory = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
    losses, count = loss_text(row), str(row.repeats)
    cells = row.name, rate, gain_text(row), step_text(row), batch, memory, losses, count
    return dict(zip(COLUMNS, cells, strict=True))


def absence(row: Row) -> str:
    """Return why a row has no figures."""
    prefix = {"timed-out": "took too long", "failed": "failed"}.get(row.status)
    return f"{prefix}: {row.reason}" if prefix else str(row.reason)


def gain_text(row: Row) -> str:
    """Return a row's gain: the verdict, the ratio and its interval."""
    if row.gain is None:
        return (
            ""
            if row.kind in {"baseline", "point"}
            else f"nothing to compare with{row.verdict and ': '}{row.verdict}"
        )
    ratio = "" if f"x{row.gain.median:.2f}" in row.verdict else f", x{row.gain.median:.2f}"
    return f"{row.verdict}{ratio}{between(row.gain, '.2f')}"


def loss_text(row: Row) -> str:
    """Return how much the losses differ, and whether the promise was kept."""
    if row.promise is None:
        return ""
    apart = (
        ""
        if row.loss_difference is None
        else "equal"
        if row.loss_difference == 0
        else f"{row.loss_difference:.0e} apart"
    )
    if row.compared_losses:
        apart = f"{apart} over {row.compared_losses}" + (
            " with train.deterministic" if row.deterministic else ""
        )
    if row.promise_kept is None:
        return ", ".join(part for part in (apart, row.promise_reason) if part)
    return (
        f"{apart}, {row.promise} kept"
        if row.promise_kept
        else f"**{row.promise} BROKEN**: {apart}; {row.promise_reason}"
    )


def step_text(row: Row) -> str:
    """Return the time of a step and its parts."""
    parts = (row.step_ms, row.data_ms, row.host_ms, row.device_ms)
    step, *rest = (milliseconds(part) for part in parts)
    return f"{step} = {' + '.join(rest)}"


def milliseconds(value: float | None) -> str:
    """Return a time with about three digits, or a question mark if it was not measured."""
    return "?" if value is None else f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f}"


def between(figure: Figure, digits: str) -> str:
    """Return an interval in brackets, or an empty string if it is unknown."""
    return (
        ""
        if figure.low is None or figure.high is None
        else f" ({figure.low:{digits}} to {figure.high:{digits}})"
    )


def bars(report: Report, *, encoding: str = "utf-8") -> str:
    """Return the report for a terminal: one bar per row with its rate and its gain.

    Broken promises and unmeasured rows follow.
    """
    most = max((row.tokens_per_s.median for row in report.rows if row.tokens_per_s), default=1.0)
    width = max((len(row.short_name) for _, rows in groups(report) for row in rows), default=0)
    full = "█" if can_show("█", encoding) else "#"
    lines = []
    for heading, rows in groups(report):
        lines += ["", heading] if heading else []
        for row in rows:
            if row.tokens_per_s is None:
                lines.append(f"{row.short_name:<{width}}  {absence(row)}")
                continue
            bar = full * max(round(BAR_COLUMNS * row.tokens_per_s.median / most), 1)
            rate = f"{row.tokens_per_s.median:>11,.0f}"
            line = f"{row.short_name:<{width}}  {bar:<{BAR_COLUMNS}}  {rate}"
            peak = "memory unknown" if row.peak_gib is None else f"{row.peak_gib:.2f} GiB"
            beside = (
                f"{between(row.tokens_per_s, ',.0f').strip()}  {peak}"
                if row.kind == "point"
                else gain_text(row)
            )
            lines.append(
                f"{line}  {beside}".rstrip()
                + ("  PROMISE BROKEN" if row.promise_kept is False else "")
            )
    promises = [
        f"{row.short_name}: {row.promise} promise broken: {row.promise_reason}"
        for row in report.rows
        if row.promise_kept is False
    ]
    lines += ["", *missing] if (missing := unreached(report)) else []
    lines += ["", "Promises", *promises] if promises else []
    return "\n".join(
        [
            f"{title(report)}, tokens/s",
            *lines,
            "",
            *filter(None, [total_text(report), baseline_text(report).capitalize()]),
            *report.notes,
        ]
    ).strip()
