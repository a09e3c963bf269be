"""The list of GPU steps: each becomes one line, and the same command continues."""

import json
import re
from dataclasses import replace

import pytest

from flatout.config.registry import RECIPES, SPEEDUPS
from flatout.hardware.machine import probe


@pytest.fixture
def gpu(benchmark, monkeypatch, tmp_path):
    module = benchmark
    monkeypatch.setattr(module, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "probe", lambda: replace(probe(), gpus=()))
    return module


@pytest.fixture
def rows(tmp_path):
    """Return the rows of the results by step."""

    def read(folder=tmp_path / "out"):
        lines = (folder / "results.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines)}

    return read


def test_every_step_is_known_here(gpu):
    """Its recipe, its speedups and the step it is compared with exist."""
    for name, step in gpu.STEPS_IN_ORDER.items():
        speedups = " ".join(step.words).partition("speedups=")[2].split(" ")[0]
        wanted = re.findall(r"[+-]([a-z][a-z0-9-]+)(?=,|$)", speedups)
        assert {*wanted} <= {*SPEEDUPS.names()}
        assert step.against in {None, *gpu.STEPS_IN_ORDER}
        assert name.partition("/")[0] in RECIPES.names() or "/" not in name


def test_without_a_gpu_every_step_is_a_skipped_line(gpu, rows, tmp_path):
    gpu.main(["--out", str(tmp_path / "out")])
    assert list(rows()) == list(gpu.STEPS_IN_ORDER)
    assert {row["status"] for row in rows().values()} == {"skipped"}
    assert "| tests |" in (tmp_path / "out" / "table.md").read_text()
