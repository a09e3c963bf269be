"""`flatout diagnose` on the command line; tests/measure has the measurements."""

from __future__ import annotations

import json
import shutil

import pytest

from flatout import cli
from flatout.commands import diagnose as command
from flatout.config.schema import load_config
from flatout.measure.diagnose.diagnose import Measured
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.instruments.evidence import Evidence, Phases, Roof


@pytest.fixture
def measured(monkeypatch, tiny_config):
    """Replace the measurement: one step of four waits for data, until prefetch is on."""
    requested = []

    def evidence(config):
        wait_s = 0.001 if "prefetch" in config.speedups else 0.03
        return Evidence(
            source="measured run",
            config=config,
            speedups=("pretokenised",),
            device="cpu",
            step_s=0.09 + wait_s,
            phases=Phases(data_wait_s=wait_s, compute_s=0.09),
            roof=Roof(peak_tflops=0.2, peak_source="measured here", mfu=0.5, tokens_per_s=1000),
            tokens_per_step=128,
            remaining_s=600,
            notes=("No profiler.",),
        )

    def measure(config, **options):
        requested.append((config, options))
        return Measured(evidence(config), diagnosis_of(evidence(config)))

    monkeypatch.setattr(command, "diagnose_recipe", measure)
    monkeypatch.setattr(command, "measure_briefly", lambda config, seconds: evidence(config))
    return requested


def run(*words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["diagnose", *words])
    return stopped.value.code


def test_json_has_verdict_shares_roof_and_findings(measured, capsys, tiny_set):
    assert run("demo-char", f"data.path={tiny_set}", "--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1], parse_constant=lambda word: pytest.fail(word))
    assert found["verdict"] == "25% of each step waits for data: 30 ms."
    assert found["shares"] == {"data_wait": 0.25, "compute": 0.75}
    assert found["roof"]["mfu"] == 0.5
    assert found["roof"]["achieved_tflops"] is None
    assert [finding["name"] for finding in found["findings"]] == ["slow-data"]
    assert found["notes"] == ["No profiler."]
    assert found["recipe"] is None
    assert found["path"] is None


def test_the_summary_fits_a_terminal(measured, capsys, tiny_set):
    assert run("demo-char", f"data.path={tiny_set}", "--seconds", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("25% of each step waits for data: 30 ms.\n")
    assert "  data wait   25%      30 ms  #####\n" in out
    assert "50.0% of the roof of 0.2 TFLOP/s (measured here)" in out
    assert "Fix: Read ahead in the background: add the speedup prefetch." in out
    assert "Note: No profiler." in out
    assert measured[0][1]["seconds"] == 2


def test_fix_writes_a_recipe_that_holds(measured, capsys, tiny_set, tmp_path):
    out = tmp_path / "better.yaml"
    words = ("demo-char", f"data.path={tiny_set}", "speedups=none", "--fix", "--out", str(out))
    assert run(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["recipe"] == str(out)
    (tried,) = found["fixes_tried"]
    assert tried["kept"]
    assert tried["gain"] == pytest.approx(0.12 / 0.091)
    assert load_config(out).speedups == "prefetch"


@pytest.mark.parametrize("name", ["mine.yaml", "absent/new.yaml", "dir.yaml"])
def test_fix_measures_nothing_when_its_recipe_cannot_be_written(
    measured, capsys, tiny_set, tmp_path, name
):
    (tmp_path / "mine.yaml").write_text("train: {steps: 3}\n")
    (tmp_path / "dir.yaml").mkdir()
    words = ("demo-char", f"data.path={tiny_set}", "--fix", "--out", str(tmp_path / name))
    assert run(*words) == 2
    assert str((tmp_path / name).parent) in capsys.readouterr().err
    assert measured == []
    assert (tmp_path / "mine.yaml").read_text() == "train: {steps: 3}\n"


def test_fix_replaces_its_own_recipe(measured, tiny_set, tmp_path):
    out = str(tmp_path / "better.yaml")
    words = ("demo-char", f"data.path={tiny_set}", "speedups=none", "--fix", "--out", out)
    assert [run(*words), run(*words)] == [0, 0]


def test_the_records_of_a_watched_loop_lead_to_the_report(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run(str(tmp_path)) == 2
    assert f"flatout report {tmp_path}" in capsys.readouterr().err


def test_a_run_is_read_and_its_findings_written(tiny_run, capsys, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    assert run(str(tmp_path / "run"), "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["source"] == "recorded run"
    assert found["path"] == str(tmp_path / "run" / "findings.json")
    stored = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert stored["verdict"] == found["verdict"]


def test_a_missing_dataset_is_a_finding_and_no_error(capsys, monkeypatch):
    requested = []
    monkeypatch.setattr(
        command,
        "diagnose_recipe",
        lambda config, **options: requested.append(config) or pytest.skip("reached"),
    )
    with pytest.raises(pytest.skip.Exception):
        cli.main(["diagnose", "demo-char", "data.path=nowhere"])
    assert requested[0].data.path == "nowhere"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demo-chr",), "There is no recipe or run named 'demo-chr'."),
        (("demo-char", "model.kind=transfromer"), "'transfromer'"),
        (("runs/frist",), "There is no run directory runs/frist."),
        (("demo-char", "--out", "new.yaml"), "--out has no effect without --fix."),
        (("demo-char", "--fix", "--out", "recipe.txt"), "--out recipe.txt is not a YAML file."),
    ],
)
def test_mistakes_are_reported(words, message, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_recipe_is_measured_in_a_process_of_its_own(tiny_config, tmp_path, monkeypatch):
    from flatout.measure.diagnose.diagnose import diagnose_recipe

    monkeypatch.chdir(tmp_path)
    found = diagnose_recipe(tiny_config(), seconds=0.2)
    assert found.evidence.source == "measured run"
    assert found.evidence.steps >= 5
    assert list(tmp_path.iterdir()) == []  # the scratch directory is gone
