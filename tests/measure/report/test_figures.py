"""The Bokeh document behind the charts."""

from __future__ import annotations

import importlib.util

import pytest

from flatout.errors import MissingPackage
from flatout.measure.report import figures, page
from flatout.measure.report.charts import drawn_charts, marks_of


def test_a_missing_package_names_its_install_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as caught:
        page.require_packages()
    assert 'pip install "flatout[report]"' in caught.value.fix


@pytest.mark.slow
def test_all_plots_share_one_horizontal_range_with_an_axis_for_each_position(make_run, read):
    runs = read(make_run(events=[{"event": "save", "step": 3}]))
    made = figures.charts_json(drawn_charts(runs), marks_of(runs))
    roots = [root["attributes"] for root in made["document"]["roots"]]
    assert len(roots) == len(made["charts"]) == 8
    assert len({str(root["x_range"].get("id")) for root in roots}) == 1
    for root in roots:
        names = [axis["attributes"].get("name") for axis in root["below"]]
        assert names == ["step", "tokens", "elapsed_s"]


def test_positions_that_no_record_has_have_no_bounds(make_run, read):
    made = figures.charts_json(drawn_charts(read(make_run(records=[{"step": 1, "a/b": 1}]))), ())
    assert made["bounds"] == {"step": [1, 1], "tokens": None, "elapsed_s": None}
