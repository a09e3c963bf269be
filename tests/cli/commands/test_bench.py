"""`flatout bench`: results and errors of the command line; tests/measure has the measurements."""

from __future__ import annotations

import json

import pytest

from flatout.cli import main as cli
from flatout.measure import bench as measuring
from flatout.measure.race import Figure, Row
from flatout.measure.results import Bench


@pytest.fixture
def sample_report():
    rate = Figure(median=100.0, low=99.0, high=101.0)
    gain = Figure(median=1.01, low=0.98, high=1.04)
    known = {"repeats": 5, "tokens_per_s": rate}
    prefetch = known | {"gain": gain}
    rows = [
        Row(name="baseline", kind="baseline", **known),
        Row(name="+ prefetch", kind="added", **prefetch),
    ]
    about = {
        "kind": "ablation",
        "recipe": "mine",
        "config": {},
        "config_digest": "",
        "commit": None,
    }
    machine = {"machine": "a CPU", "environment": {}, "path": "bench/mine", "began": "now"}
    limits = {"wall_s": 1.0, "minutes": 6.0, "repeats": 5, "num_trials": 10}
    total = {"total": Figure(median=2.16, low=2.1, high=2.2), "total_speedup": 2.16}
    return Bench(**about, **machine, **limits, **total, notes=[], rows=rows)


@pytest.fixture
def measured(sample_report, monkeypatch, tmp_path):
    """Replace the measurement with the sample report, and record the arguments."""
    arguments = {}

    def run_bench(config, **options):
        arguments.update(options, config=config)
        path = str(options["out"] or tmp_path / "bench")
        return sample_report.model_copy(update={"path": path})

    monkeypatch.setattr(measuring, "run_bench", run_bench)
    return arguments


def run(*words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *words])
    return stopped.value.code


def test_json_contains_the_rows_and_the_total(measured, capsys, tmp_path, tiny_set):
    out = str(tmp_path / "out")
    words = ("shakespeare-char", f"data.path={tiny_set}", "--minutes", "6", "--out", out)
    assert run(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["total_speedup"] == 2.16
    assert found["total"] == {"median": 2.16, "low": 2.1, "high": 2.2}
    assert found["path"] == out
    assert [row["name"] for row in found["rows"]] == ["baseline", "+ prefetch"]
    assert found["rows"][1]["gain"] == {"median": 1.01, "low": 0.98, "high": 1.04}
    assert (measured["minutes"], measured["repeats"]) == (6, None)
    assert measured["config"].data.path == str(tiny_set)


def test_the_summary_shows_the_total_and_the_paths_of_the_results(
    measured, capsys, tmp_path, tiny_set
):
    words = ("shakespeare-char", f"data.path={tiny_set}", "--sweep", "batch", "--repeats", "3")
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert "The full set is 2.16 times as fast as the baseline (2.10 to 2.20)." in shown
    assert "none (0.98-1.04)" in shown
    assert (measured["sweep"], measured["repeats"]) == ("batch", 3)


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_an_interruption_shows_the_results_and_sets_the_exit_code(
    sample_report, capsys, tiny_set, monkeypatch, number, code
):
    stopped = sample_report.model_copy(update={"complete": False, "ended_by_signal": number})
    monkeypatch.setattr(measuring, "run_bench", lambda config, **options: stopped)
    assert run("shakespeare-char", f"data.path={tiny_set}") == code
    assert "none (0.98-1.04)" in capsys.readouterr().out
    assert run("shakespeare-char", f"data.path={tiny_set}", "--json") == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["complete"], found["ended_by_signal"]) == (False, number)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shakespeare-chr"], "shakespeare-char"),
        (["shakespeare-char"], "data.path is not set"),
        (["shakespeare-char", "optim.lrr=1"], "optim.lr"),
        (["shakespeare-char", "data.path=nowhere"], "nowhere"),
        (["shakespeare-char", "data.path=SET", "--sweep", "bacth"], "batch"),
        (["shakespeare-char", "--sweep", "--out", "x"], "'--out' is not one of 'batch', 'seq_len'"),
        (["shakespeare-char", "--minutes", "0"], "minutes"),
        (["shakespeare-char", "--repeats", "0"], "repeats"),
    ],
)
def test_usage_errors_are_reported_before_measuring(
    words, message, capsys, tmp_path, monkeypatch, tiny_set
):
    monkeypatch.chdir(tmp_path)
    assert run(*(word.replace("SET", str(tiny_set)) for word in words)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
