"""`flatout.metrics`: the metrics of a run as columns."""

from __future__ import annotations

import pytest

import flatout
from flatout.errors import CheckpointError
from flatout.training.run_dir.table import columns


def test_rows_keep_their_order_and_gaps_are_none():
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 1, "val/loss": 2.5}]
    assert columns(rows) == {"step": [1, 1], "train/loss": [3.0, None], "val/loss": [None, 2.5]}
    assert columns([]) == {}


def test_metrics_of_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: tiny\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 2, "train/loss": 4.5}\n{"step": 3, ')
    table = flatout.metrics(tmp_path / "run")
    assert table == {"step": [2], "train/loss": [4.5]}
    with pytest.raises(CheckpointError, match="There is no run directory"):
        flatout.metrics(tmp_path / "rum")


def test_pandas_reads_the_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        columns([{"step": 1, "train/loss": 3.0}, {"step": 1, "val/loss": 2.5}])
    )
    assert frame["val/loss"].dropna().tolist() == [2.5]
    assert frame.groupby("step").first().loc[1].to_dict() == {"train/loss": 3.0, "val/loss": 2.5}
