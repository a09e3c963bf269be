"""A report as a Markdown table, and as bars in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.measure.results import INTERRUPTED, TIME_WAS_UP, Report, Row
from flatout.measure.statistics import Figure

HEADINGS = {
    ("baseline", "added"): "One at a time, from the plain way up",
    ("left-out",): "Left out of the full set, one at a time: what each is worth there",
    ("put-in",): "Put into the full set: what is off here by itself",
    ("point",): "",
    ("absent",): "Not measured",
}
"""Which kinds of rows stand together, and what is above them."""

BAR_COLUMNS = 28


def groups(report: Report) -> list[tuple[str, list[Row]]]:
    """Return the report's rows as they stand together, each group with its heading.

    Empty groups are left out, and the rows whose turn never came: `unreached` names them.
    """
    found = [
        (heading, [row for row in report.rows if row.kind in kinds and not row.is_unreached])
        for kinds, heading in HEADINGS.items()
    ]
    return [(heading, rows) for heading, rows in found if rows]


def unreached(report: Report) -> list[str]:
    """Return the rows whose turn never came, a line for each reason."""
    missing = [row for row in report.rows if row.is_unreached]
    return [
        f"Not measured, {why}: {', '.join(row.short_name for row in missing if why in str(row.reason))}."
        for why in (TIME_WAS_UP, INTERRUPTED)
        if any(why in str(row.reason) for row in missing)
    ]


def table(report: Report) -> str:
    """Return the whole report as Markdown: what it is, its tables, and how it was made."""
    lines = [f"# {title(report)}", ""]
    if report.total_speedup is not None:
        lines += [f"**{total_words(report)}**", ""]
    for heading, rows in groups(report):
        if heading:
            lines += [f"## {heading}", ""]
        lines += (
            absent_lines(rows)
            if rows[0].kind == "absent"
            else row_lines(rows, sweep=rows[0].kind == "point")
        )
        lines.append("")
    lines += [part for line in unreached(report) for part in (line, "")]
    lines += [f"{setting(report)}", "", *[f"- {note}" for note in report.notes]]
    return "\n".join(lines).rstrip() + "\n"


def title(report: Report) -> str:
    """Return what was measured, in a few words."""
    return (
        f"{report.recipe}: the ladder"
        if report.kind == "ladder"
        else f"{report.recipe}: a sweep of {report.kind}"
    )


def total_words(report: Report) -> str:
    """Return the total speedup as a sentence; an empty text where there is none."""
    figure = report.total_speedup
    if figure is None:
        return ""
    told = f"The full set is {figure.median:.2f} times as fast as the baseline"
    if figure.low is not None:
        return f"{told}{between(figure, '.2f')}."
    fewest = min(
        (row.repeats for row in report.rows if row.kind in {"baseline", "added"} and row.repeats),
        default=0,
    )
    return f"{told} ({'one repeat: ' if fewest < 2 else ''}too few {'' if fewest < 2 else 'repeats '}to be sure)."


def baseline_words(report: Report) -> str:
    """Return what a ladder's baseline is, with its micro-batch; an empty text where it gave no
    figures.
    """
    row = next((row for row in report.rows if row.kind == "baseline" and row.rows_per_device), None)
    if row is None:
        return ""
    batch = f"{row.rows_per_device} rows x {row.accumulate} accumulations"
    return f"baseline: fp32, eager, an optimizer that loops over parameters, text tokenised in the step, {batch}"


def setting(report: Report) -> str:
    """Return where and how the figures were made, in one line."""
    facts = [*filter(None, [baseline_words(report)]), report.machine]
    facts += [
        f"{name} {report.environment[name]}"
        for name in ("torch", "threads")
        if name in report.environment
    ]
    facts += [
        f"{report.repeats} interleaved rounds, each trial in a process of its own",
        "medians with 94% intervals",
    ]
    facts += ["gains are medians of the ratios within rounds"] if report.kind == "ladder" else []
    facts += [f"commit {report.commit}"] if report.commit else []
    return "; ".join([*facts, report.began]) + "."


def row_lines(rows: Sequence[Row], *, sweep: bool) -> list[str]:
    """Return rows with figures as a table; a row without them says why across it."""
    names = [
        "",
        "tokens/s",
        *([] if sweep else ["gain"]),
        "step = data + host + device, ms",
        "rows x accumulations",
        "GiB",
        *([] if sweep else ["losses"]),
        "n",
    ]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        if row.tokens_per_s is None:
            cells = [row.name, absence(row), *[""] * (len(names) - 2)]
        else:
            rows_cell = f"{row.rows_per_device} x {row.accumulate}"
            cells = [
                row.name,
                f"{row.tokens_per_s.median:,.0f}{between(row.tokens_per_s, ',.0f')}",
                *([] if sweep else [gain_words(row)]),
            ]
            cells += [
                split_words(row),
                rows_cell,
                f"{row.peak_gib:.2f}" if row.peak_gib else "",
                *([] if sweep else [loss_words(row)]),
                str(row.repeats),
            ]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines + [
        f"\n{row.name}: {row.reason}" for row in rows if row.tokens_per_s is not None and row.reason
    ]


def absent_lines(rows: Sequence[Row]) -> list[str]:
    """Return what was not measured, a line each with the reason."""
    return [f"- {row.name}: {row.reason}" for row in rows]


def absence(row: Row) -> str:
    """Return why a row has no figures."""
    begin = {"timed-out": "took too long", "failed": "failed"}.get(row.status)
    return f"{begin}: {row.reason}" if begin else str(row.reason)


def gain_words(row: Row) -> str:
    """Return a row's gain: the verdict, the ratio, its interval."""
    if row.gain is None:
        return (
            ""
            if row.kind in {"baseline", "point"}
            else f"nothing to compare with{row.verdict and ': '}{row.verdict}"
        )
    ratio = "" if f"x{row.gain.median:.2f}" in row.verdict else f", x{row.gain.median:.2f}"
    return f"{row.verdict}{ratio}{between(row.gain, '.2f')}"


def loss_words(row: Row) -> str:
    """Return how far the losses are from those it is compared with, and what became of the promise."""
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


def split_words(row: Row) -> str:
    """Return the step and its parts."""
    parts = (row.step_ms, row.data_ms, row.host_ms, row.device_ms)
    step, *rest = (milliseconds(part) for part in parts)
    return f"{step} = {' + '.join(rest)}"


def milliseconds(value: float | None) -> str:
    """Return a time in about three digits; a question mark when it was not measured."""
    return (
        "?"
        if value is None
        else f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 1
        else f"{value:.2f}"
    )


def between(figure: Figure, digits: str) -> str:
    """Return an interval in brackets; nothing when it is unknown."""
    return (
        ""
        if figure.low is None or figure.high is None
        else f" ({figure.low:{digits}} to {figure.high:{digits}})"
    )


def bars(report: Report, *, encoding: str = "utf-8") -> str:
    """Return the report for a terminal: a bar a row, its rate, its gain; then what broke a promise
    and what was not measured.
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
            told = f"{row.short_name:<{width}}  {bar:<{BAR_COLUMNS}}  {row.tokens_per_s.median:>11,.0f}"
            beside = (
                f"{between(row.tokens_per_s, ',.0f').strip()}  {row.peak_gib or 0:.2f} GiB"
                if row.kind == "point"
                else gain_words(row)
            )
            lines.append(
                f"{told}  {beside}".rstrip()
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
            *filter(None, [total_words(report), baseline_words(report).capitalize()]),
            *report.notes,
        ]
    ).strip()


def can_show(text: str, encoding: str) -> bool:
    """Say whether an encoding has these characters."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
