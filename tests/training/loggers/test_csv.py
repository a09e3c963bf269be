"""The table metrics.csv: a copy of metrics.jsonl, also over a resume."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest

from flatout.training.loggers.csv import Csv
from flatout.training.run import run_training
from flatout.training.run_dir.lookup import metrics


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(folder, logger, record):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    if logger:
        logger.on_record(record)


def test_a_new_number_becomes_a_new_column(tmp_path):
    logger = Csv()
    logger.on_start(SimpleNamespace(folder=tmp_path))
    assert not (tmp_path / "metrics.csv").exists()
    write(tmp_path, logger, {"step": 1, "train/loss": 3.5})
    write(tmp_path, logger, {"step": 2, "train/loss": 3.25})
    write(tmp_path, logger, {"step": 2, "val/loss": 3.0})
    write(tmp_path, logger, {"step": 3, "train/loss": 2.5})
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,train/loss,val/loss\n1,3.5,\n2,3.25,\n2,,3.0\n3,2.5,\n"
    )


def test_a_resume_starts_from_the_records_that_remain(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,3.5\n2,9.0\n")
    write(tmp_path, None, {"step": 1, "train/loss": 3.5})
    logger = Csv()
    logger.on_start(SimpleNamespace(folder=tmp_path))
    write(tmp_path, logger, {"step": 2, "train/loss": 3.25})
    assert [row["train/loss"] for row in rows_of(tmp_path / "metrics.csv")] == ["3.5", "3.25"]


@pytest.mark.slow
def test_a_run_writes_the_same_table_that_the_api_returns(tiny_config, tmp_path):
    run_training(tiny_config(train__steps=3, log__to="csv"), tmp_path / "run")
    table = metrics(tmp_path / "run")
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    for name, column in table.items():
        assert [float(row[name]) if row[name] else None for row in rows] == column
    assert table["step"] == [1, 2, 3, 3]
    assert table["val/loss"][:3] == [None] * 3
    assert not (tmp_path / "run" / "tensorboard").exists()
