"""Results are read back, and never mixed with those of another bench."""

from __future__ import annotations

import json

import pytest

from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.measure.experiments import bench as results
from flatout.measure.experiments.bench import claim, commit_of_package, results_dir, write
from flatout.measure.experiments.records import Trial, TrialResult
from flatout.measure.experiments.report import Bench

CONFIG = load_config("shakespeare-char")


def written(place):
    return Bench.model_validate_json((place / "bench.json").read_text())


def at(path, report, **changes):
    return report.model_copy(update={"path": str(path), **changes})


def test_a_report_is_read_back_unchanged(sample_report, tmp_path):
    report = at(tmp_path / "new" / "bench", sample_report)
    write(report)
    assert written(tmp_path / "new" / "bench") == report
    assert (tmp_path / "new" / "bench" / "table.md").read_text() == report.table()


def test_results_get_their_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = results_dir(CONFIG, "ladder", None)
    assert first.parts[0] == "bench"
    assert first.name.startswith("shakespeare-char-")
    for expected in (first, first.with_name(f"{first.name}-2"), first.with_name(f"{first.name}-3")):
        assert results_dir(CONFIG, "ladder", None) == expected
        expected.mkdir(parents=True)
    assert results_dir(CONFIG, "batch", None).name == f"{first.name}-batch"


def test_a_directory_with_other_files_is_refused(sample_report, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="contains other files"):
        results_dir(CONFIG, "ladder", tmp_path / "mine")
    with pytest.raises(ConfigError, match="is a file"):
        results_dir(CONFIG, "ladder", tmp_path / "mine" / "thesis.txt")
    assert results_dir(CONFIG, "ladder", tmp_path / "new") == tmp_path / "new"


def test_only_the_same_bench_is_repeated_in_its_directory(tmp_path):
    failed = TrialResult(status="failed", reason="It fell over.")
    trial = Trial(point="baseline", round=0, seed=0, result=failed)
    results.keep(trial, [CONFIG.name, "ladder", CONFIG.digest()], "2026-11-20", tmp_path)
    assert results_dir(CONFIG, "ladder", tmp_path) == tmp_path
    for config, kind in ((CONFIG, "batch"), (CONFIG.with_values({"train.seed": 5}), "ladder")):
        with pytest.raises(
            ConfigError,
            match=(
                f"contains the bench of shakespeare-char .ladder, .*; this one is of "
                f"shakespeare-char .{kind}"
            ),
        ) as refused:
            results_dir(config, kind, tmp_path)
        assert "--out" in refused.value.fix
    (tmp_path / "trials.jsonl").write_text('{"something": "else"}\n')
    with pytest.raises(ConfigError, match="contains other files"):
        results_dir(CONFIG, "ladder", tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_report_is_replaced(sample_report, tmp_path, text):
    (tmp_path / "bench.json").write_text(text)
    report = at(tmp_path, sample_report, complete=False)
    write(report)
    assert written(tmp_path) == report


def test_there_is_no_commit_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PACKAGE_DIR", tmp_path)
    assert commit_of_package() is None


@pytest.mark.parametrize("label", ["abc", 3, ["tiny", "ladder"], [1, 2, 3]])
def test_trials_with_an_invalid_label_count_as_other_files(label, tmp_path, tiny_config):
    (tmp_path / "trials.jsonl").write_text(json.dumps({"bench": label}) + "\n")
    with pytest.raises(ConfigError, match="contains other files"):
        results_dir(tiny_config(), "ladder", tmp_path)


def test_an_unwritable_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Cannot write .*file/x: Not a directory"):
        claim(tmp_path / "file" / "x")
