"""The table and the bars show every kind of row."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from flatout.measure.experiments.records import Figure, Row
from flatout.measure.experiments.report import Bench, step_text


def line_of(text, name):
    starts = (f"| {name} |", f"{name} ", f"- {name}:")
    return next(line for line in text.splitlines() if line.startswith(starts))


def test_every_kind_of_row_is_in_the_table(sample_report):
    text = sample_report.table()
    assert text.startswith(
        "# shakespeare-char: ablation\n\n**The full set is 2.16 times as fast as the baseline "
        "(2.10 to 2.20).**"
    )
    for name, shown in (
        ("baseline", "13,415 (13,013 to 13,952)"),
        ("baseline", "300 = 12.3 + 0.46 + 287"),
        ("baseline", "| 1 x 64 |"),
        ("+ pretokenised", "| x2.10 (2.07 to 2.13) |"),
        ("+ pretokenised", "equal over 20, within tolerance (exact)"),
        ("+ prefetch", "| no measurable gain (0.98 to 1.04) |"),
        ("+ prefetch", "3e-07 apart over 20, within tolerance (rounding)"),
        (
            "+ wrong",
            "**out of tolerance (exact)**: 2e-01 apart over 20; 20 losses, tolerance: bit-equal",
        ),
        ("+ wrong", "| unsure: too few repeats |"),
        ("+ huge", "Out of memory at step 0: it needs 91 GiB."),
        ("all but prefetch", "not checked: two repeats"),
        ("all, with bf16 for fp16", "slower, x0.87 (0.84 to 0.90)"),
        ("all and compile", "took too long: It did not end within 90 s."),
        ("tf32", "- tf32: cannot run here, because: it is a CPU."),
    ):
        assert shown in line_of(text, name)
    for shown in (
        "\n\nNot measured, the time was up: all but wrong, all and liger.\n\n",
        "gains are medians of the ratios within rounds",
        "all, with bf16 for fp16: timed-out in one repeat",
        "torch 2.13.0; threads 2; 5 interleaved rounds",
        "commit abc1234",
        "- Not every line has 5 repeats.",
    ):
        assert shown in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {9}


def test_the_baseline_is_described_where_there_is_one(sample_report):
    stated = "optimizer that loops over parameters, text tokenised in the step, 1 rows x 64 acc"
    swept = sample_report.model_copy(update={"rows": sample_report.rows[1:]})
    for shown in (Bench.table, Bench.bars):
        assert stated in shown(sample_report)
        assert "aseline: fp32" not in shown(swept)


def test_the_table_of_a_sweep_has_no_gains_and_unknown_memory_is_not_zero(sample_report):
    points = [
        row.model_copy(update={"kind": "point", "gain": None, "peak_gib": None})
        for row in sample_report.rows
        if row.kind == "added"
    ]
    changes = {"kind": "batch", "rows": points, "total_speedup": None}
    report = sample_report.model_copy(update=changes)
    text = report.table()
    assert text.startswith("# shakespeare-char: a sweep of batch\n\n| ")
    assert "gain" not in text
    assert "losses" not in text
    assert "memory unknown" in report.bars()
    assert "0.00" not in report.bars() + text


@pytest.mark.parametrize(
    ("encoding", "mark"), [("utf-8", "█"), ("ascii", "#"), ("no-such-encoding", "#")]
)
def test_the_bars_show_every_row(sample_report, encoding, mark):
    text = sample_report.bars(encoding)
    for row in sample_report.rows:
        assert row.is_unreached or line_of(text, row.short_name)
    assert (
        "\n\nNot measured, the time was up: all but wrong, all and liger.\n\nOut of tolerance\n"
        "+ wrong: exact tolerance exceeded" in text
    )
    assert line_of(text, "+ wrong").count(mark) == 28
    assert line_of(text, "baseline").count(mark) == 13
    assert "OUT OF TOLERANCE" in line_of(text, "+ wrong")
    assert "The full set is 2.16 times" in text
    assert max(map(len, text.splitlines())) < 120


def test_bars_of_nothing(sample_report):
    reason = "not measured: it was interrupted before its turn."
    empty = Row(name="baseline", kind="baseline", status="not-measured", reason=reason)
    changes = {"rows": [empty], "total_speedup": None, "complete": False}
    bars = sample_report.model_copy(update=changes).bars()
    assert "Not measured, it was interrupted: baseline." in bars


@pytest.mark.parametrize(
    ("low", "high", "sentence"),
    [
        (None, None, "The gain of the full set over the baseline is unsure: too few repeats."),
        (0.9, 4.5, "The full set is not measurably faster than the baseline (0.90 to 4.50)."),
    ],
)
def test_a_gain_that_its_interval_does_not_support_is_no_number(sample_report, low, high, sentence):
    """One outlier among few repeats gives a median of 4.37."""
    gain = Figure(median=4.37, low=low, high=high)
    rows = [
        row.model_copy(
            update={"gain": gain, "verdict": gain.verdict(left_out=row.kind == "leave-one-out")}
        )
        for row in sample_report.rows
    ]
    facts = {"total_speedup": 4.37, "total_speedup_low": low, "total_speedup_high": high}
    report = sample_report.model_copy(update={"rows": rows, **facts})
    assert f"**{sentence}**" in report.table()
    assert "4.37" not in report.table() + report.bars()


def test_times_have_about_three_digits():
    for value, shown in ((None, "?"), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123")):
        times = {"step_ms": 300.0, "data_ms": value, "host_ms": 2.0, "device_ms": 8.0}
        assert step_text(Row(name="a", kind="baseline", **times)) == f"300 = {shown} + 2.0 + 8.0"


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_shows_the_bars_and_the_machine(sample_report):
    root = ElementTree.fromstring(sample_report.picture())
    texts = ["".join(each.itertext()).replace("\xa0", " ") for each in root.iter(f"{SVG}text")]
    shown = " ".join(" ".join(texts).split())  # long lines are wrapped
    for row in sample_report.rows:
        assert row.kind == "absent" or row.short_name in shown
    assert max(map(len, re.findall("█+", shown))) == 28
    assert "x2.10 (2.07 to 2.13)" in shown
    assert "OUT OF TOLERANCE" in shown
    assert "A <fast> CPU & more" in shown
    assert sample_report.picture() == sample_report.picture()
