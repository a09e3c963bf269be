"""How results are shown: numbers with their units, and text for terminals, Markdown and HTML.

A pydantic model declares how its fields are shown:

    class Score(Result):
        loss: Annotated[float | None, Show("Loss", loss)]
        datasets: Annotated[list[DatasetScore], Show("By dataset")]

`displayed` turns it into a `Display`, which `terminal_text`, `markdown` and `html` write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import BaseModel

UNKNOWN = "–"
"""Shown for what was not measured."""
LEAST_TEXT = 16
"""Columns of a terminal that a column of text keeps when a wide table wraps it."""


def duration(seconds: float) -> str:
    """Return a duration in readable form: 0.4 s, 8 s, 1 min 02 s, 2 h 05 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def milliseconds(seconds: float) -> str:
    """Return a time with three digits and its unit: 12.3 ms, 1.23 s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def age(seconds: float) -> str:
    """Return an age in its largest unit: 8 s, 5 min, 23 h, 3 d."""
    units = ((86_400, "d"), (3600, "h"), (60, "min"))
    return next(
        (f"{seconds // length:.0f} {unit}" for length, unit in units if seconds >= length),
        f"{seconds:.0f} s",
    )


def amount(number: float, unit: str = "") -> str:
    """Return a number with its unit in short form: 12.3 MB, 61.2 K tokens, 1,234 documents.

    A unit in the plural loses its `s` after 1.
    """
    if unit == "bytes":
        for step, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if number >= step:
                return f"{number / step:.1f} {name}"
        return f"{number:.0f} bytes"
    for least, step, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if number >= least:
            return f"{number / step:.1f} {name} {unit}".rstrip()
    short = f"{number:.1f}" if number < 10 and number != int(number) else f"{number:,.0f}"
    return f"{short} {unit.removesuffix('s') if short == '1' else unit}".rstrip()


def gib(size: float) -> str:
    """Return memory in GiB, or in MiB where two digits would hide it."""
    return f"{size:,.2f} GiB" if size >= 0.1 else f"{1024 * size:.1f} MiB"


def memory_size(num_bytes: float) -> str:
    """Return memory as `gib` does, given its bytes."""
    return gib(num_bytes / 2**30)


def digits(number: float) -> str:
    """Return a number with up to four digits, or all those before the decimal point."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def loss(nats: float) -> str:
    """Return a loss in nats per token: 3.1416."""
    return f"{nats:.4f}"


def rate(tokens_per_s: float) -> str:
    """Return a rate in short form: 61.2 K tokens/s."""
    return f"{amount(tokens_per_s)} tokens/s"


def quoted(text: str) -> str:
    """Return text that a model wrote as a block, with a bar on its left."""
    return "\n".join(f"  | {line}".rstrip() for line in text.strip("\n").splitlines())


@dataclass(frozen=True)
class Show:
    """How a field of a model is shown: `Annotated[float | None, Show("Loss", loss)]`.

    A list of models is a table under this label, of the fields of its items that are shown. Any
    other field is a line, or a column. A line without text and a column without any are left out.
    """

    label: str = ""
    form: Callable[[Any], str] | str = ""
    """A function from the value to its text, or a format spec."""
    record: Callable[[Any], str] | None = None
    """A function from the whole model to the text, for what depends on several fields."""
    unknown: str = UNKNOWN
    """The text of None."""
    align: Literal["left", "right"] | None = None
    """Of a column. None: numbers to the right, text to the left."""

    def text(self, value: object, model: object) -> str:
        """Return the text of a field's value in its model."""
        if self.record is not None:
            return self.record(model)
        if value is None:
            return self.unknown
        if isinstance(self.form, str):
            return format(value, self.form) if self.form else plain(value)
        return self.form(value)


@dataclass(frozen=True)
class Column:
    """The head of a table's column."""

    label: str
    align: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Table:
    """Rows of text."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Display:
    """What is shown of a result, before it is written for a terminal, in Markdown or in HTML."""

    headline: str = ""
    values: Sequence[tuple[str, str]] = ()
    """Names and texts."""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    """Sentences below everything else."""


def plain(value: object) -> str:
    """Return a value as text when nothing says how to show it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return UNKNOWN if value is None else str(value)


def displayed(model: BaseModel) -> Display:
    """Return what is shown of a model: its `headline`, its fields with a `Show`, its `notes`."""
    values: list[tuple[str, str]] = []
    tables: list[Table] = []
    for name, show in _shows(type(model)):
        value = getattr(model, name)
        if isinstance(value, list | tuple) and value and hasattr(value[0], "model_fields_set"):
            table = table_of(value, show.label)
            tables += [table] if table.columns else []
        elif text := show.text(value, model):
            values.append((show.label, text))
    headline, notes = getattr(model, "headline", ""), getattr(model, "notes", ())
    return Display(headline, values, tables, notes)


def table_of(models: Sequence[BaseModel], title: str = "") -> Table:
    """Return a table with a row for each of some models of one type, and a column per shown field.

    A column that is empty in all rows is left out.
    """
    columns, texts = [], []
    for name, show in _shows(type(models[0])):
        values = [getattr(model, name) for model in models]
        cells = [show.text(*pair) for pair in zip(values, models, strict=True)]
        if set(cells) <= {"", show.unknown}:
            continue
        known = next((value for value in values if value is not None), None)
        is_number = isinstance(known, int | float) and not isinstance(known, bool)
        columns.append(Column(show.label, show.align or ("right" if is_number else "left")))
        texts.append(cells)
    return Table(columns, list(zip(*texts, strict=True)), title)


def _shows(model: type[BaseModel]) -> Iterator[tuple[str, Show]]:
    for name, field in model.model_fields.items():
        yield from ((name, each) for each in field.metadata if isinstance(each, Show))


def terminal_text(display: Display, width: int | None = None) -> str:
    """Return a display as lines of at most `width` columns. None: the lines are not wrapped.

    Text wraps at spaces. Words, such as paths, are never cut.
    """
    blocks = [value_lines(display.values, width)] if display.values else []
    blocks += [_table_lines(table, width) for table in display.tables]
    if display.headline:
        is_untitled = bool(display.values) or not any(each.title for each in display.tables[:1])
        below = blocks.pop(0) if blocks and is_untitled else []
        blocks.insert(0, [*wrap(display.headline, width, 2), *below])
    if display.notes:
        blocks.append([line for note in display.notes for line in wrap(note, width, 2)])
    return "\n\n".join("\n".join(map(str.rstrip, block)) for block in blocks)


def value_lines(values: Sequence[tuple[str, str]], width: int | None = None) -> list[str]:
    """Return names and texts in two columns, the texts wrapped in theirs."""
    indent = max((_cells(name) for name, _ in values), default=0) + 2
    is_narrow = width is not None and indent > width // 2
    lines = []
    for name, text in values:
        column = 2 if is_narrow else indent
        first, *rest = wrap(text, None if width is None else width - column)
        if is_narrow:
            lines += [name, " " * column + first]
        else:
            lines.append(_padded(name, indent) + first)
        lines += [" " * column + line for line in rest]
    return lines


def _table_lines(table: Table, width: int | None) -> list[str]:
    """Return a table as lines. If it is too wide, its widest column of text wraps.

    Where that is not enough, each row is a block of lines with the labels of the columns.
    """
    title = wrap(table.title, width, 2) if table.title else []
    labels, aligns = zip(*((each.label, each.align) for each in table.columns), strict=True)
    rows = [labels, *table.rows] if any(labels) else table.rows
    widths = [max(map(_cells, column)) for column in zip(*rows, strict=True)]
    excess = 0 if width is None else sum(widths) + 2 * len(widths) - 2 - width
    if excess > 0:
        left = [at for at, align in enumerate(aligns) if align == "left"] or [0]
        widest = max(left, key=widths.__getitem__)
        widths[widest] -= excess
        longest = max(_cells(word) for row in rows for word in row[widest].split() or [""])
        if widths[widest] < max(longest, LEAST_TEXT):
            for row in table.rows:
                pairs = [pair for pair in zip(labels, row, strict=True) if pair[1]]
                own = [pairs.pop(0)[1]] if pairs and not labels[0] else []  # names the row
                title += ["", *own, *value_lines(pairs, width)]
            return title if table.title else title[1:]
    lines = []
    for row in rows:
        cells = [wrap(text, size) for text, size in zip(row, widths, strict=True)]
        for texts in zip_longest(*cells, fillvalue=""):
            parts = map(_padded, texts, widths, aligns)
            lines.append("  ".join(parts))
    return [*title, *lines]


def wrap(text: str, width: int | None, hanging: int = 0) -> list[str]:
    """Return text in lines of at most `width` columns, broken at spaces. Words are never cut.

    Lines after the first one of a paragraph are indented by `hanging` more columns.
    """
    lines = []
    for paragraph in text.split("\n"):
        if width is None or _cells(paragraph) <= width:
            lines.append(paragraph)
            continue
        margin = " " * (len(paragraph) - len(paragraph.lstrip(" ")))
        line = ""
        for word in paragraph.split():
            if not line:
                line = margin + word
            elif _cells(line) + 1 + _cells(word) <= width:
                line += f" {word}"
            else:
                lines.append(line)
                line = margin + " " * hanging + word
        lines.append(line)
    return lines


def _cells(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def _padded(text: str, width: int, align: Literal["left", "right"] = "left") -> str:
    padding = " " * (width - _cells(text))
    return text + padding if align == "left" else padding + text


def markdown(display: Display) -> str:
    """Return a display as Markdown."""

    def escaped(text: str) -> str:
        for sign in "\\|<*":
            text = text.replace(sign, f"\\{sign}")
        return text.replace("\n", "<br>")

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    blocks = [[escaped(display.headline)]] if display.headline else []
    if display.values:
        blocks.append([f"- {escaped(name)}: {escaped(text)}" for name, text in display.values])
    for table in display.tables:
        if table.title:
            blocks.append([f"### {escaped(table.title)}"])
        rule = ["---:" if column.align == "right" else "---" for column in table.columns]
        rows = [[column.label for column in table.columns], *table.rows]
        head, *body = (row([*map(escaped, cells)]) for cells in rows)
        blocks.append([head, row(rule), *body])
    if display.notes:
        blocks.append([f"- {escaped(note)}" for note in display.notes])
    return "\n\n".join("\n".join(block) for block in blocks)


def html(display: Display) -> str:
    """Return a display as a fragment of HTML, with nothing but tags and text."""
    from html import escape

    def tag(name: str, *inside: str) -> str:
        return f"<{name}>{''.join(inside)}</{name.split()[0]}>"

    def cell(name: str, text: str) -> str:
        return tag(name, escape(text).replace("\n", "<br>"))

    parts = [cell("p", display.headline)] if display.headline else []
    if display.values:
        parts.append(tag("dl", *(cell("dt", n) + cell("dd", text) for n, text in display.values)))
    for table in display.tables:
        kinds = ["td class=number" if each.align == "right" else "td" for each in table.columns]
        kinds[0] = "th scope=row"
        head = (cell("th scope=col", column.label) for column in table.columns)
        body = (tag("tr", *map(cell, kinds, row)) for row in table.rows)
        caption = cell("caption", table.title) if table.title else ""
        parts.append(tag("table", caption, tag("thead", tag("tr", *head)), tag("tbody", *body)))
    if display.notes:
        parts.append(tag("ul", *(cell("li", note) for note in display.notes)))
    return "\n".join(parts)
