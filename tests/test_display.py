"""Numbers with their units, and results as text for terminals, in Markdown and in HTML."""

from typing import Annotated

import pytest

from flatout.display import (
    Column,
    Display,
    Show,
    Table,
    age,
    amount,
    digits,
    displayed,
    duration,
    gib,
    html,
    loss,
    markdown,
    milliseconds,
    rate,
    terminal_text,
)
from flatout.storage.files import Stored
from flatout.storage.json_io import Result


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (2.46, "2.5 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (62, "1 min 02 s"),
        (3599.8, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "documents", "0 documents"),
        (3.25, "batches", "3.2 batches"),
        (1234, "documents", "1,234 documents"),
        (1, "documents", "1 document"),
        (1.04, "tokens", "1.0 tokens"),
        (61_234, "tokens", "61.2 K tokens"),
        (12_345_678, "bytes", "12.3 MB"),
        (999, "bytes", "999 bytes"),
        (2_060_000, "", "2.1 M"),
        (3e9, "tokens", "3.0 G tokens"),
    ],
)
def test_amount(number, unit, text):
    assert amount(number, unit) == text


def test_other_units():
    assert [age(s) for s in (8, 330, 83_000, 300_000)] == ["8 s", "5 min", "23 h", "3 d"]
    assert [milliseconds(s) for s in (0.01234, 1.234)] == ["12.3 ms", "1.23 s"]
    assert [digits(number) for number in (0.123456, 12_345.6)] == ["0.1235", "12,346"]
    assert [gib(size) for size in (0.004, 33.5)] == ["4.1 MiB", "33.50 GiB"]
    assert [loss(3.14159), rate(61_234)] == ["3.1416", "61.2 K tokens/s"]


class Trial(Stored):
    """A row of the table."""

    name: Annotated[str, Show("trial")]
    tokens_per_s: Annotated[float | None, Show("tokens/s", ",.0f")]
    gain: Annotated[float | None, Show("gain", "+.0%")] = None
    seed: int = 0
    fits: Annotated[bool | None, Show("fits")] = None
    why: Annotated[str, Show("why")] = ""


class Trials(Result):
    """A result that declares how it is shown."""

    recipe: Annotated[str, Show("Recipe")]
    steps: Annotated[
        int, Show("Steps", record=lambda trials: f"{trials.steps:,} of {trials.last_step:,}")
    ]
    last_step: int
    val_loss: Annotated[float | None, Show("Validation loss", loss)]
    peak_gib: Annotated[float | None, Show("Memory", gib, unknown="")] = None
    speedups: Annotated[tuple[str, ...], Show("Speedups")] = ()
    params: Annotated[dict[str, int], Show("Parameters")]
    trials: Annotated[tuple[Trial, ...], Show("Trials")] = ()
    hidden: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def headline(self):
        """What was found."""
        return f"{self.recipe}: `compile` is worth most, with losses that agree in every step."


TRIALS = Trials(
    recipe="gpt2",
    steps=1200,
    last_step=5000,
    val_loss=None,
    speedups=("bf16", "compile"),
    params={"blocks": 1_234_567, "head": 8},
    trials=(
        Trial(name="bf16", tokens_per_s=61_234.4, fits=True),
        Trial(
            name="compile",
            tokens_per_s=None,
            why="The compiler was not available, so this trial was left out of the table.",
        ),
    ),
    notes=("Measured beside another process that used four of eight cores <all the time>.",),
)


def test_a_result_on_a_wide_screen_has_no_empty_lines_or_columns():
    assert TRIALS.summary() == (
        """\
gpt2: `compile` is worth most, with losses that agree in every step.
Recipe           gpt2
Steps            1,200 of 5,000
Validation loss  –
Speedups         bf16, compile
Parameters       blocks 1,234,567, head 8

Trials
trial    tokens/s  fits  why
bf16       61,234  yes
compile         –  –     The compiler was not available, so this trial was left out of the table.

Measured beside another process that used four of eight cores <all the time>."""
    )


def test_text_wraps_in_its_column_at_80():
    assert terminal_text(TRIALS.display(), 80).split("\n\n")[1] == (
        """\
Trials
trial    tokens/s  fits  why
bf16       61,234  yes
compile         –  –     The compiler was not available, so this trial was left
                         out of the table."""
    )


def test_a_table_that_is_too_wide_becomes_blocks_of_lines_at_40():
    assert terminal_text(TRIALS.display(), 40) == (
        """\
gpt2: `compile` is worth most, with
  losses that agree in every step.
Recipe           gpt2
Steps            1,200 of 5,000
Validation loss  –
Speedups         bf16, compile
Parameters       blocks 1,234,567, head
                 8

Trials

trial     bf16
tokens/s  61,234
fits      yes

trial     compile
tokens/s  –
fits      –
why       The compiler was not
          available, so this trial was
          left out of the table.

Measured beside another process that
  used four of eight cores <all the
  time>."""
    )


def test_the_widest_text_wraps_and_a_first_column_without_label_names_its_block():
    table = Table(
        [Column(""), Column("why"), Column("n", "right")],
        [("train.steps=5 train.device=cpu", "short", "1"), ("none", "-", "2")],
    )
    assert terminal_text(Display(tables=[table]), 30) == (
        """\
                      why    n
train.steps=5         short  1
train.device=cpu
none                  -      2"""
    )
    assert terminal_text(Display(tables=[table]), 24) == (
        """\
train.steps=5 train.device=cpu
why  short
n    1

none
why  -
n    2"""
    )


@pytest.mark.parametrize("width", [1, 7, 20, 40, 60, 80])
def test_no_word_is_lost_at_any_width(width):
    text = terminal_text(TRIALS.display(), width)
    assert {"gpt2", "61,234", "1,200", "–", "`compile`", "table.", "<all"} <= {*text.split()}
    assert max(map(len, text.split("\n"))) <= max(width, len("Validation loss"))


def test_a_path_is_never_broken_and_names_that_take_half_the_screen_stand_alone():
    values = [("Directory of the run", "runs/a-name-that-is-long/checkpoints"), ("Step", "5")]
    assert terminal_text(Display(values=values), 30) == (
        "Directory of the run\n  runs/a-name-that-is-long/checkpoints\nStep\n  5"
    )


def test_signs_of_two_columns_and_accents_are_aligned():
    table = Table([Column("name"), Column("n", "right")], [("日本", "1"), ("e\u0301te", "12")])
    assert terminal_text(Display(tables=[table])) == "name   n\n日本   1\ne\u0301te   12"


def test_a_headline_stands_directly_above_a_table_without_title_or_heads():
    table = Table([Column(""), Column("")], [("a", "b")])
    assert terminal_text(Display("Two:", tables=[table])) == "Two:\na  b"
    titled = Table(table.columns, table.rows, "Letters")
    assert terminal_text(Display("Two:", tables=[titled])) == "Two:\n\nLetters\na  b"
    assert terminal_text(Display("Two:", notes=["Three."])) == "Two:\n\nThree."


def test_markdown():
    assert markdown(TRIALS.display()) == (
        """\
gpt2: `compile` is worth most, with losses that agree in every step.

- Recipe: gpt2
- Steps: 1,200 of 5,000
- Validation loss: –
- Speedups: bf16, compile
- Parameters: blocks 1,234,567, head 8

### Trials

| trial | tokens/s | fits | why |
| --- | ---: | --- | --- |
| bf16 | 61,234 | yes |  |
| compile | – | – | The compiler was not available, so this trial was left out of the table. |

- Measured beside another process that used four of eight cores \\<all the time>."""
    )
    table = Table([Column("a|b")], [("*x*\n\\",)])
    assert markdown(Display(tables=[table])) == "| a\\|b |\n| --- |\n| \\*x\\*<br>\\\\ |"


def test_html_escapes_every_text():
    evil = '<b a="1">&'
    table = Table([Column(evil), Column("n", "right")], [(evil, "1\n2")], evil)
    escaped = "&lt;b a=&quot;1&quot;&gt;&amp;"
    assert html(Display(evil, [(evil, evil)], [table], [evil])) == (
        f"<p>{escaped}</p>\n<dl><dt>{escaped}</dt><dd>{escaped}</dd></dl>\n"
        f"<table><caption>{escaped}</caption><thead><tr><th scope=col>{escaped}</th>"
        "<th scope=col>n</th></tr></thead><tbody>"
        f"<tr><th scope=row>{escaped}</th><td class=number>1<br>2</td></tr></tbody></table>\n"
        f"<ul><li>{escaped}</li></ul>"
    )


def test_a_model_that_shows_nothing_is_empty_and_json_does_not_change():
    class Silent(Result):
        path: str
        trials: Annotated[tuple[Trial, ...], Show("Trials")] = ()

    assert Silent(path="runs").summary() == ""
    assert displayed(Silent(path="runs")) == Display(values=[], tables=[])
    assert TRIALS.model_dump()["val_loss"] is None
    assert Trials.model_validate_json(TRIALS.model_dump_json()) == TRIALS
