"""`flatout tune`: its options and errors; tests/measure has the search."""

import json

import pytest

from flatout.cli import main as cli
from flatout.measure import tune as measuring
from flatout.measure.intervals import Figure
from flatout.measure.race import Row
from flatout.measure.results import Tuning


@pytest.fixture
def tuned(monkeypatch):
    """Replace the measurement by a sample, and record the arguments."""
    arguments = {}
    figures = {"tokens_per_s": Figure(median=12_345.0), "peak_gib": 0.5}
    gain = {"gain": Figure(median=1.12, low=1.1, high=1.14), "taken": True}
    rows = [Row(name="a", **figures, **gain), Row(name="b", gain=Figure(median=0.7))]
    best = Row(name="c", kind="best", rows_per_device=8, accumulate=4, **figures, **gain)
    about = {"path": "tuned.yaml", "recipe": "mine", "machine": "a CPU"}
    about |= {"tokens_per_step": 4096, "precision": "fp32"}

    def run_tune(config, **options):
        arguments.update(options, config=config)
        number = arguments.get("ended_by")
        ended = {"complete": number is None, "ended_by_signal": number}
        return Tuning(**about, **ended, wall_s=9.0, num_trials=12, best=best, changes=rows)

    monkeypatch.setattr(measuring, "run_tune", run_tune)
    return arguments


def test_the_options_reach_the_search_and_the_result_is_shown(tuned, capsys, tiny_set):
    words = f"tune shakespeare-char data.path={tiny_set} --minutes 6 --only batch --out t.yaml"
    assert cli.execute(words.split()) == 0
    shown = capsys.readouterr().out
    assert "12,345 tokens/s; gain over auto: x1.12 (1.10 to 1.14)" in shown
    assert "x0.70, unsure" in shown
    assert (tuned["minutes"], tuned["only"], tuned["statistical"]) == (6, ("batch",), False)
    assert str(tuned["out"]) == "t.yaml"


@pytest.mark.parametrize(("number", "code"), [(None, 0), (2, 130), (15, 143)])
def test_json_has_all_fields_also_after_an_interruption(tuned, capsys, tiny_set, number, code):
    tuned["ended_by"] = number
    assert cli.execute(["tune", "shakespeare-char", f"data.path={tiny_set}", "--json"]) == code
    shown = capsys.readouterr()
    found = json.loads(shown.out.splitlines()[-1])
    assert ("Interrupted" in shown.err) == (number is not None)
    assert (found["complete"], found["ended_by_signal"]) == (number is None, number)
    assert found["best"]["gain"] == {"median": 1.12, "low": 1.1, "high": 1.14}
    assert [change["taken"] for change in found["changes"]] == [True, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("shakespeare-chr", "shakespeare-char"),
        ("shakespeare-char", "data.path is not set"),
        ("shakespeare-char data.path=nowhere", "nowhere"),
        ("shakespeare-char data.path=SET --only bacth", "batch"),
        ("shakespeare-char data.path=SET --minutes 0.5", "0.5 is not in the range x>=1"),
        ("shakespeare-char data.path=SET --out fx.txt", "fx.txt is not a YAML file"),
        ("shakespeare-char data.path=SET --out s3://bucket/t.yaml", "--out"),
    ],
)
def test_usage_errors_are_reported_before_measuring(
    words, message, capsys, tmp_path, monkeypatch, tiny_set
):
    monkeypatch.chdir(tmp_path)
    assert cli.execute(["tune", *words.replace("SET", str(tiny_set)).split()]) == 2
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
    assert cli.execute(words.split()) == 2
    assert f"Did you mean `{meant}`?" in " ".join(capsys.readouterr()).replace("\\n", " ")


@pytest.mark.parametrize("command", ["tune", "diagnose", "run", "compare"])
def test_the_help_shows_the_command_of_a_script_first(command, capsys):
    assert cli.execute([command, "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"Usage: flatout {command} [OPTIONS] -- COMMAND")
    assert first.count("-- COMMAND") == 1 + (command == "compare")


def test_json_after_the_two_dashes_belongs_to_the_script(capsys):
    for command in ("tune", "diagnose", "run --with bf16"):
        assert cli.execute([*command.split(), "--", "no-such-command", "--json"]) == 2
        shown = capsys.readouterr()
        assert "There is no command 'no-such-command'" in shown.err
        assert shown.out == ""
    assert cli.execute(["diagnose", "--json", "--", "no-such-command"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
