"""`flatout tune`: results and errors of the command line; tests/measure has the search."""

from __future__ import annotations

import json

import pytest

from flatout.cli import main as cli
from flatout.measure import tune as measuring
from flatout.measure.race import Figure, Row
from flatout.measure.results import Tuning


@pytest.fixture
def sample_tuning():
    rate = Figure(median=12_345.0, low=12_000.0, high=12_700.0)
    gain = Figure(median=1.12, low=1.1, high=1.14)
    figures = {"tokens_per_s": rate, "gain": gain, "peak_gib": 0.5}
    checked = {"tolerance": "rounding", "within_tolerance": True, "loss_difference": 1e-5}
    name = "batch.rows_per_device=8"
    change = Row(name=name, against="auto", taken=True, repeats=5, **checked, **figures)
    slower = {"name": "+ checkpointing", "taken": False, "gain": Figure(median=0.7)}
    best = Row(
        name="rows 8",
        kind="best",
        rows_per_device=8,
        accumulate=4,
        speedups=["prefetch"],
        **figures,
    )
    about = {"path": "tuned.yaml", "recipe": "mine", "machine": "a CPU", "start": "auto"}
    about |= {"began": "2026-11-22T10:00:00+00:00", "environment": {"torch": "2.13.0"}}
    return Tuning(
        **about,
        wall_s=90.0,
        num_trials=12,
        tokens_per_step=4096,
        best=best,
        prefetch=4,
        precision="fp32",
        is_rehearsed=True,
        changes=[change, change.model_copy(update=slower)],
        not_tried=[Row(name="fp8", reason="not tried: it is a CPU.")],
    )


@pytest.fixture
def tuned(sample_tuning, monkeypatch):
    """Replace the measurement with the sample, and record the arguments."""
    arguments = {}

    def run_tune(config, **options):
        arguments.update(options, config=config)
        number = arguments.get("ended_by")
        ended = {"complete": number is None, "ended_by_signal": number}
        return sample_tuning.model_copy(update=ended)

    monkeypatch.setattr(measuring, "run_tune", run_tune)
    return arguments


def run(*words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", *words])
    return stopped.value.code


def test_json_contains_the_best_setting_and_the_choices(tuned, capsys, tmp_path, tiny_set):
    words = ["shakespeare-char", f"data.path={tiny_set}", "--minutes", "6", "--only", "batch"]
    assert run(*words, "--out", str(tmp_path / "t.yaml"), "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["best"]["rows_per_device"] == 8
    assert found["best"]["gain"] == {"median": 1.12, "low": 1.1, "high": 1.14}
    assert [change["taken"] for change in found["changes"]] == [True, False]
    assert found["complete"] is True
    assert (tuned["minutes"], tuned["only"], tuned["statistical"]) == (6, ("batch",), False)
    assert str(tuned["out"]) == str(tmp_path / "t.yaml")


def test_the_summary_shows_gains_and_the_next_command(tuned, capsys, tiny_set):
    assert run("shakespeare-char", f"data.path={tiny_set}") == 0
    shown = capsys.readouterr().out
    assert "12,345 tokens/s; gain over auto: x1.12 (1.10 to 1.14)" in shown
    assert "0.70 times as fast" in shown


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_an_interruption_shows_the_results_and_sets_the_exit_code(
    tuned, capsys, tiny_set, number, code
):
    tuned["ended_by"] = number
    assert run("shakespeare-char", f"data.path={tiny_set}", "--json") == code
    shown = capsys.readouterr()
    assert "Interrupted" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["ended_by_signal"] == number


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shakespeare-chr"], "shakespeare-char"),
        (["shakespeare-char"], "data.path is not set"),
        (["shakespeare-char", "data.path=nowhere"], "nowhere"),
        (["shakespeare-char", "data.path=SET", "--only", "bacth"], "batch"),
        (["shakespeare-char", "data.path=SET", "--minutes", "0.5"], "0.5 is not in the range x>=1"),
        (["shakespeare-char", "data.path=SET", "--out", "fx.txt"], "fx.txt is not a YAML file"),
        (["shakespeare-char", "data.path=SET", "--out", "s3://bucket/t.yaml"], "--out"),
    ],
)
def test_usage_errors_are_reported_before_measuring(
    words, message, capsys, tmp_path, monkeypatch, tiny_set
):
    monkeypatch.chdir(tmp_path)
    assert run(*(word.replace("SET", str(tiny_set)) for word in words)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("tune python train.py --epochs 3", "flatout tune -- python train.py --epochs 3"),
        ("tune --minutes 3 train.py", "flatout tune --minutes 3 -- train.py"),
        ("diagnose --json torchrun train.py", "flatout diagnose --json -- torchrun train.py"),
        ("run --with bf16 train.py --lr 1", "flatout run --with bf16 -- train.py --lr 1"),
    ],
)
def test_a_script_without_the_two_dashes_is_recognised(words, meant, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert f"Did you mean `{meant}`?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tune", "diagnose", "run"])
def test_the_help_shows_the_command_of_a_script_first(command, capsys):
    assert cli.execute([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: flatout {command} [OPTIONS] -- COMMAND")
    assert cli.execute(["compare", "--help"]) == 0
    assert "[OPTIONS] -- COMMAND -- COMMAND\n" in capsys.readouterr().out


def test_json_after_the_two_dashes_belongs_to_the_script(capsys):
    for command in ("tune", "diagnose", "run --with bf16"):
        assert cli.execute([*command.split(), "--", "no-such-command", "--json"]) == 2
        shown = capsys.readouterr()
        assert "There is no command 'no-such-command'" in shown.err
        assert shown.out == ""
    assert cli.execute(["diagnose", "--json", "--", "no-such-command"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
