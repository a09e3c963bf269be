"""The charts of a report: their lines, colours and axes."""

from __future__ import annotations

import numpy as np
import pytest

from flatout.measure.report.charts import MAX_OTHER_CHARTS, charts_json, drawn_charts

pytestmark = pytest.mark.slow


def by_key(charts):
    return {chart.key: chart for chart in charts}


def test_a_run_has_the_charts_of_its_numbers(make_run, read):
    charts = by_key(drawn_charts(read(make_run())))
    assert [*charts] == ["loss", "rate", "step", "memory", "norm", "lr"]
    labels = [line.label for line in charts["step"].lines]
    assert labels == ["step", "device", "host", "waiting for data"]
    records = [{"step": 1, "gpu/util_pct": 97.0, "gpu/power_w": 640.0, "perf/mfu": 0.5}]
    charts = by_key(drawn_charts(read(make_run("gpu", records=records))))
    assert [*charts] == ["mfu", "gpu", "power"]
    assert charts["mfu"].lines[0].curve[-1] == pytest.approx(50.0)
    assert drawn_charts(read(make_run("none", records=[{"step": 1, "train/loss": None}]))) == []


def test_one_run_is_coloured_by_metric_and_several_by_run(make_run, read):
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


def test_other_metrics_have_charts_of_their_own_up_to_a_number(make_run, read):
    records = [{"step": 1, "val/loss/book": 2.0} | {f"my/f{n:03}": 1.0 for n in range(100)}]
    charts = drawn_charts(read(make_run(records=records)))
    assert len(charts) == MAX_OTHER_CHARTS
    assert "train/epoch" not in [chart.title for chart in charts]


def test_all_plots_share_one_horizontal_range_with_an_axis_for_each_position(make_run, read):
    made = charts_json(drawn_charts(read(make_run())))
    roots = [root["attributes"] for root in made["document"]["roots"]]
    assert len(roots) == len(made["charts"]) == 6
    assert len({str(root["x_range"].get("id")) for root in roots}) == 1
    for root in roots:
        names = [axis["attributes"].get("name") for axis in root["below"]]
        assert names == ["step", "tokens", "elapsed_s"]


def test_a_short_curve_has_a_marker_at_each_point(make_run, read):
    records = [{"step": step, "train/loss": float(step)} for step in range(100)]
    drawn = []
    for number in (1, 5, 100):
        (chart,) = drawn_charts(read(make_run(str(number), records=records[:number])))
        (root,) = charts_json([chart])["document"]["roots"]
        glyphs = [each["attributes"]["glyph"]["name"] for each in root["attributes"]["renderers"]]
        drawn.append(glyphs)
        assert np.array_equal(chart.lines[0].curve[0], range(number))
    assert drawn == [["Scatter"], ["Line", "Scatter"], ["Line"]]


def test_positions_that_no_record_has_have_no_bounds(make_run, read):
    made = charts_json(drawn_charts(read(make_run(records=[{"step": 1, "a/b": 1}]))))
    assert made["bounds"] == {"step": [1, 1], "tokens": None, "elapsed_s": None}
