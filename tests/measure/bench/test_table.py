"""The table and the bars show every kind of row."""

from __future__ import annotations

import pytest

from flatout.measure.bench.table import bars, milliseconds, table
from flatout.measure.trials.results import Row
from flatout.measure.trials.statistics import Figure


def line_of(text, name):
    return next(
        line
        for line in text.splitlines()
        if line.startswith((f"| {name} |", f"{name} ", f"- {name}:"))
    )


def test_every_kind_of_row_is_in_the_table(sample_report):
    text = table(sample_report)
    assert text.startswith(
        "# shakespeare-char: the ladder\n\n**The full set is 2.16 times as fast as the baseline "
        "(2.10 to 2.20).**"
    )
    assert "13,415 (13,013 to 13,952)" in line_of(text, "baseline")
    assert "300 = 12.3 + 0.46 + 287" in line_of(text, "baseline")
    assert "| x2.10 (2.07 to 2.13) |" in line_of(text, "+ pretokenised")
    assert "equal over 20, exact kept" in line_of(text, "+ pretokenised")
    assert "no measurable gain, x1.01 (0.98 to 1.04)" in line_of(text, "+ prefetch")
    assert "3e-07 apart over 20, rounding kept" in line_of(text, "+ prefetch")
    assert "**exact BROKEN**: 2e-01 apart over 20; 20 losses, bit-equal promised" in line_of(
        text, "+ wrong"
    )
    assert "x1.02, too few repeats to be sure" in line_of(text, "+ wrong")
    assert "Out of memory at step 0: it needs 91 GiB." in line_of(text, "+ huge")
    assert "not checked: two repeats" in line_of(text, "all but prefetch")
    assert "\n\nNot measured, the time was up: all but wrong, all and liger.\n\n" in text
    assert "slower, x0.87 (0.84 to 0.90)" in line_of(text, "all, with bf16 for fp16")
    assert "gains are medians of the ratios within rounds" in text
    assert "took too long: It had not ended after 90 s." in line_of(text, "all and compile")
    assert "all, with bf16 for fp16: timed-out in one repeat" in text
    assert line_of(text, "tf32") == "- tf32: cannot run here, because: it is a CPU."
    assert "torch 2.13.0; threads 2; 5 interleaved rounds" in text
    assert "commit abc1234" in text
    assert "- Not every line has 5 repeats." in text


def test_the_baseline_states_its_micro_batch_wherever_a_report_is_shown(sample_report):
    stated = (
        "aseline: fp32, eager, an optimizer that loops over parameters, text tokenised in the "
        "step, 1 rows x 64 accumulations"
    )
    assert all(stated in shown(sample_report) for shown in (table, bars))
    assert "| 1 x 64 |" in line_of(table(sample_report), "baseline")
    swept = sample_report.model_copy(update={"rows": sample_report.rows[1:]})
    assert not any("aseline: fp32" in shown(swept) for shown in (table, bars))


def test_every_line_of_a_table_has_its_columns(sample_report):
    lines = [line for line in table(sample_report).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {9}


def test_the_table_of_a_sweep_has_no_gains(sample_report):
    points = [
        row.model_copy(update={"kind": "point", "gain": None})
        for row in sample_report.rows
        if row.kind == "added"
    ]
    text = table(
        sample_report.model_copy(update={"kind": "batch", "rows": points, "total_speedup": None})
    )
    assert text.startswith("# shakespeare-char: a sweep of batch\n\n| ")
    assert "gain" not in text
    assert "losses" not in text


@pytest.mark.parametrize(
    ("encoding", "mark"), [("utf-8", "█"), ("ascii", "#"), ("no-such-encoding", "#")]
)
def test_the_bars_show_every_row(sample_report, encoding, mark):
    text = bars(sample_report, encoding=encoding)
    for row in sample_report.rows:
        assert row.is_unreached or line_of(text, row.short_name)
    assert (
        "\n\nNot measured, the time was up: all but wrong, all and liger.\n\nPromises\n+ wrong: "
        "exact promise broken" in text
    )
    assert line_of(text, "+ wrong").count(mark) == 28
    assert line_of(text, "baseline").count(mark) == 13
    assert "PROMISE BROKEN" in line_of(text, "+ wrong")
    assert "The full set is 2.16 times" in text
    assert max(map(len, text.splitlines())) < 120


def test_unknown_memory_is_not_zero(sample_report):
    point = sample_report.rows[0].model_copy(update={"kind": "point", "peak_gib": None})
    report = sample_report.model_copy(update={"rows": (point,)})
    assert "memory unknown" in bars(report)
    assert "0.00" not in bars(report) + table(report)


def test_bars_of_nothing():
    from types import SimpleNamespace

    empty = Row(
        name="baseline",
        kind="baseline",
        status="not-measured",
        reason="not measured: it was interrupted before its turn.",
    )
    shown = bars(
        SimpleNamespace(rows=[empty], recipe="mine", kind="ladder", total_speedup=None, notes=[])
    )
    assert "Not measured, it was interrupted: baseline." in shown


@pytest.mark.parametrize(
    ("repeats", "reason"),
    [(1, "one repeat: too few to be sure"), (3, "too few repeats to be sure")],
)
def test_a_total_of_too_few_repeats_is_marked_unsure(sample_report, repeats, reason):
    rows = [
        row.model_copy(update={"repeats": repeats}) if row.repeats else row
        for row in sample_report.rows
    ]
    report = sample_report.model_copy(
        update={"rows": rows, "total_speedup": Figure(median=4.03, low=None, high=None)}
    )
    assert f"**The full set is 4.03 times as fast as the baseline ({reason}).**" in table(report)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "?"), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123")]
)
def test_times_have_about_three_digits(value, shown):
    assert milliseconds(value) == shown
