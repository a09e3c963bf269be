"""The charts of a report, and the lines in them."""

from __future__ import annotations

import numpy as np
import pytest

from flatout.measure.report.charts import CHARTS, MAX_OTHER_CHARTS, drawn_charts


def by_key(charts):
    return {chart.key: chart for chart in charts}


def test_a_run_has_the_charts_of_its_numbers(make_run, read):
    charts = by_key(drawn_charts(read(make_run())))
    assert [*charts] == ["loss", "throughput", "step", "wait", "memory", "norm", "lr"]
    labels = [line.label for line in charts["step"].lines]
    assert labels == ["step", "device", "host", "waiting for data"]
    assert charts["wait"].lines[0].curve.value == pytest.approx(10.0)
    records = [{"step": 1, "gpu/util_pct": 97.0, "gpu/power_w": 640.0, "perf/mfu": 0.5}]
    charts = by_key(drawn_charts(read(make_run("gpu", records=records))))
    assert [*charts] == ["mfu", "gpu", "power"]
    assert charts["mfu"].lines[0].curve.value == pytest.approx(50.0)
    assert drawn_charts(read(make_run("none", records=[{"step": 1, "train/loss": None}]))) == []


def test_one_run_is_coloured_by_number_and_several_by_run(make_run, read):
    one, two = make_run("one"), make_run("two")
    lines = by_key(drawn_charts(read(one)))["step"].lines
    assert [line.color for line in lines] == [0, 1, 2, 3]
    charts = by_key(drawn_charts(read(one, two)))
    lines = charts["step"].lines
    assert [line.color for line in lines] == [0] * 4 + [1] * 4
    assert len({line.dash for line in lines[:4]}) == 4
    assert [line.label for line in charts["lr"].lines] == ["one", "two"]
    assert charts["loss"].lines[0].label == "one · training"
    keys = [line.key for drawn in charts.values() for line in drawn.lines]
    assert len(set(keys)) == len(keys)
    assert len({chart.key for chart in CHARTS}) == len(CHARTS)


def test_other_numbers_have_charts_of_their_own_up_to_a_number(make_run, read):
    records = [{"step": 1, "val/loss/book": 2.0} | {f"my/f{n:03}": 1.0 for n in range(100)}]
    charts = drawn_charts(read(make_run(records=records)))
    assert len(charts) == MAX_OTHER_CHARTS
    assert "train/epoch" not in [chart.title for chart in charts]


def test_a_short_curve_has_markers_and_a_long_one_a_trend(make_run, read):
    records = [{"step": step, "train/loss": 1.0, "train/lr": 1.0} for step in range(2000)]
    charts = by_key(drawn_charts(read(make_run(records=records))))
    (loss,) = charts["loss"].lines
    assert not loss.has_markers
    assert loss.trend is not None
    assert charts["lr"].lines[0].trend is None
    (short,) = drawn_charts(read(make_run("short", records=records[:5])))[0].lines
    assert short.has_markers
    assert np.array_equal(short.curve.step, range(5))
