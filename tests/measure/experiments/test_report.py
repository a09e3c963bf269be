"""The table and the bars show every kind of row."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from flatout.measure.experiments.records import Figure, Row
from flatout.measure.experiments.report import Bench, step_text


def line_of(text, name):
    return next(
        line
        for line in text.splitlines()
        if line.startswith((f"| {name} |", f"{name} ", f"- {name}:"))
    )


def test_every_kind_of_row_is_in_the_table(sample_report):
    text = sample_report.table()
    assert text.startswith(
        "# shakespeare-char: the ladder\n\n**The full set is 2.16 times as fast as the baseline "
        "(2.10 to 2.20).**"
    )
    assert "13,415 (13,013 to 13,952)" in line_of(text, "baseline")
    assert "300 = 12.3 + 0.46 + 287" in line_of(text, "baseline")
    assert "| x2.10 (2.07 to 2.13) |" in line_of(text, "+ pretokenised")
    assert "equal over 20, exact kept" in line_of(text, "+ pretokenised")
    assert "| no measurable gain (0.98 to 1.04) |" in line_of(text, "+ prefetch")
    assert "3e-07 apart over 20, rounding kept" in line_of(text, "+ prefetch")
    assert "**exact BROKEN**: 2e-01 apart over 20; 20 losses, bit-equal promised" in line_of(
        text, "+ wrong"
    )
    assert "| unsure: too few repeats |" in line_of(text, "+ wrong")
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
    assert all(stated in shown(sample_report) for shown in (Bench.table, Bench.bars))
    assert "| 1 x 64 |" in line_of(sample_report.table(), "baseline")
    swept = sample_report.model_copy(update={"rungs": sample_report.rungs[1:]})
    assert not any("aseline: fp32" in shown(swept) for shown in (Bench.table, Bench.bars))


def test_every_line_of_a_table_has_its_columns(sample_report):
    lines = [line for line in sample_report.table().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {9}


def test_the_table_of_a_sweep_has_no_gains(sample_report):
    points = [
        row.model_copy(update={"kind": "point", "gain": None})
        for row in sample_report.rungs
        if row.kind == "added"
    ]
    changes = {"kind": "batch", "rungs": points, "total_speedup": None}
    text = sample_report.model_copy(update=changes).table()
    assert text.startswith("# shakespeare-char: a sweep of batch\n\n| ")
    assert "gain" not in text
    assert "losses" not in text


@pytest.mark.parametrize(
    ("encoding", "mark"), [("utf-8", "█"), ("ascii", "#"), ("no-such-encoding", "#")]
)
def test_the_bars_show_every_row(sample_report, encoding, mark):
    text = sample_report.bars(encoding)
    for row in sample_report.rungs:
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
    point = sample_report.rungs[0].model_copy(update={"kind": "point", "peak_gib": None})
    report = sample_report.model_copy(update={"rungs": (point,)})
    assert "memory unknown" in report.bars()
    assert "0.00" not in report.bars() + report.table()


def test_bars_of_nothing(sample_report):
    empty = Row(
        name="baseline",
        kind="baseline",
        status="not-measured",
        reason="not measured: it was interrupted before its turn.",
    )
    report = sample_report.model_copy(
        update={"rungs": [empty], "total_speedup": None, "complete": False}
    )
    assert "Not measured, it was interrupted: baseline." in report.bars()


@pytest.mark.parametrize(
    ("low", "high", "sentence"),
    [
        (None, None, "The gain of the full set over the baseline is unsure: too few repeats."),
        (0.9, 4.5, "The full set is not measurably faster than the baseline (0.90 to 4.50)."),
    ],
)
def test_a_gain_that_its_interval_does_not_support_is_no_figure(sample_report, low, high, sentence):
    """One outlier among few repeats gives a median of 4.37."""
    gain = Figure(median=4.37, low=low, high=high)
    facts = {"total_speedup": 4.37, "total_speedup_low": low, "total_speedup_high": high}
    rows = [
        row.model_copy(update={"gain": gain, "verdict": gain.verdict(left_out=is_left_out)})
        for row in sample_report.rungs
        for is_left_out in [row.kind == "left-out"]
    ]
    report = sample_report.model_copy(update={"rungs": rows} | facts)
    assert f"**{sentence}**" in report.table()
    assert "4.37" not in report.table() + report.bars()


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "?"), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123")]
)
def test_times_have_about_three_digits(value, shown):
    row = Row(name="a", kind="baseline", step_ms=300.0, data_ms=value, host_ms=2.0, device_ms=8.0)
    assert step_text(row) == f"300 = {shown} + 2.0 + 8.0"


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_shows_the_bars_and_the_machine(sample_report):
    root = ElementTree.fromstring(sample_report.picture())
    texts = ["".join(each.itertext()).replace("\xa0", " ") for each in root.iter(f"{SVG}text")]
    shown = " ".join(" ".join(texts).split())  # long lines are wrapped
    for row in sample_report.rungs:
        assert row.kind == "absent" or row.short_name in shown
    assert max(map(len, re.findall("█+", shown))) == 28
    assert "x2.10 (2.07 to 2.13)" in shown
    assert "PROMISE BROKEN" in shown
    assert "A <fast> CPU & more" in shown
    assert sample_report.picture() == sample_report.picture()
