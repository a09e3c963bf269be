"""Results are read back, and never mixed with those of another bench."""

from __future__ import annotations

import json

import pytest

from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.measure.experiments import bench as results
from flatout.measure.experiments.bench import commit_of_package, results_dir, write
from flatout.measure.experiments.records import Trial, TrialResult
from flatout.measure.experiments.report import Bench

CONFIG = load_config("shakespeare-char")


def test_results_get_their_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = results_dir(CONFIG, "ablation", None)
    assert first.parts[0] == "bench"
    assert first.name.startswith("shakespeare-char-")
    for expected in (first, first.with_name(f"{first.name}-2"), first.with_name(f"{first.name}-3")):
        assert results_dir(CONFIG, "ablation", None) == expected
        expected.mkdir(parents=True)
    assert results_dir(CONFIG, "batch", None).name == f"{first.name}-batch"


def test_a_directory_with_other_files_is_rejected(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="contains other files"):
        results_dir(CONFIG, "ablation", tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        results_dir(CONFIG, "ablation", tmp_path / "thesis.txt")
    assert results_dir(CONFIG, "ablation", tmp_path / "new") == tmp_path / "new"
    (tmp_path / "new").mkdir()
    for line in [{"something": "else"}, *({"bench": each} for each in ("abc", 3, ["a", "b"]))]:
        (tmp_path / "new" / "trials.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(ConfigError, match="contains other files"):
            results_dir(CONFIG, "ablation", tmp_path / "new")


def test_only_the_same_bench_is_repeated_in_its_directory(tmp_path):
    failed = TrialResult(status="failed", reason="It fell over.")
    trial = Trial(point="baseline", round=0, seed=0, result=failed)
    results.keep(trial, [CONFIG.name, "ablation", CONFIG.digest()], "2026-11-20", tmp_path)
    assert results_dir(CONFIG, "ablation", tmp_path) == tmp_path
    for config, kind in ((CONFIG, "batch"), (CONFIG.with_values({"train.seed": 5}), "ablation")):
        words = f"bench of shakespeare-char .ablation, .*. This one is of shakespeare-char .{kind}"
        with pytest.raises(ConfigError, match=words) as refused:
            results_dir(config, kind, tmp_path)
        assert "--out" in refused.value.fix


def test_a_damaged_report_is_replaced(sample_report, tmp_path):
    report = sample_report.model_copy(update={"path": str(tmp_path), "complete": False})
    for text in ("{", "[]", "{}"):
        (tmp_path / "bench.json").write_text(text)
        write(report)
        assert Bench.model_validate_json((tmp_path / "bench.json").read_text()) == report


def test_there_is_no_commit_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PACKAGE_DIR", tmp_path)
    assert commit_of_package() is None
