"""`flatout profile`: its result and its text."""

import json
from pathlib import Path

import pytest

from flatout.cli import main as cli

pytestmark = pytest.mark.slow


def test_it_prints_the_profile_and_its_fields(tiny_run, tmp_path, capsys):
    config, out = tiny_run / "config.yaml", tmp_path / "out"
    words = ["profile", str(config), "--steps", "1", "--skip", "1", "--out", str(out), "--json"]
    assert cli.execute(words) == 0
    printed, shown = capsys.readouterr()
    answer = json.loads(printed.splitlines()[-1])
    assert Path(answer["trace"]).name == "trace.json.gz"
    assert Path(answer["trace"]).exists()
    assert answer["steps"] == 1
    assert answer["snapshot"] is None
    assert answer["profiled_step_ms"] > 0
    assert answer["table"][0]["kind"]
    assert "ui.perfetto.dev" in shown
    assert "matmul" in shown
