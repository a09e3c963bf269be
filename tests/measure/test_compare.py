"""Two commands race: which is faster, do their losses agree, and what the gate says."""

import subprocess
import sys
from pathlib import Path

import pytest

import flatout
from flatout.cli import main as cli
from flatout.errors import ConfigError, RunFailed
from flatout.measure import compare as comparing
from flatout.measure import trial
from flatout.measure.trial import Result

SCRIPT = """
import sys, time, torch
from speed import WAIT_S
weights = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weights], lr=0.1)
for step in range(10**6):
    (weights * torch.randn(3)).sum().backward()
    optimizer.step()
    time.sleep(WAIT_S)
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Commands whose last word is their step in ms; `wrong` shifts the losses; `fails` fails."""
    monkeypatch.chdir(tmp_path)
    seeds, ran = [], []

    def run_command(command, request, **_):
        seeds.append(request.timing.seed_offset)
        ran.append(command[-1])
        if command[-1] == "fails" or ("once" in command and len(ran) > 4):
            return Result(failed={"x": "ValueError: boom"})
        jitter = 1 + 0.002 * (len(ran) % 3)
        losses = [3.0 + seeds[-1] + 0.5 * ("wrong" in command)] * 20
        found = {"step_s": [1e-3 * float(command[-1]) * jitter] * 20, "losses": losses}
        return Result(**found, peak_gib=float(command[-1]) / 10, process_s=1.0)

    monkeypatch.setattr(trial, "run_command", run_command)
    monkeypatch.setattr(comparing, "program_in", list)
    monkeypatch.setattr(trial, "LOOK_S", 0.0)
    return ran


def test_the_faster_command_is_found_in_turns(made_up):
    found = flatout.compare(script=["train", "10", "--", "train", "5"])
    assert found.ratio.low < 2.0 < found.ratio.high
    assert found.ratio.low > 1.9
    assert made_up[:4] == ["10", "5", "5", "10"]
    assert (found.losses.within_tolerance, found.losses.loss_difference) == (True, 0.0)
    assert [side.step_ms for side in found.sides] == pytest.approx([10, 5], rel=0.01)
    assert found.headline.startswith("b is 2.0")
    assert "losses equal" in found.summary()
    assert found.exit_code == 0


def test_a_command_that_is_slower_than_asked_is_exit_code_3(made_up, capsys):
    words = "compare --at-least 0.95 --json -- train 5 -- train 6"
    assert cli.execute(words.split()) == 3
    assert '"at_least": 0.95' in capsys.readouterr().out
    assert cli.execute(words.replace("train 6", "train 5.01").split()) == 0
    assert cli.execute(words.replace("0.95", "0.5").split()) == 0


def test_the_gate_races_the_ratio_by_equal_work(made_up):
    words = ["train", "10", "--", "train", "20"]
    assert not flatout.compare(script=words, work=2.0, at_least=1.0).is_slower
    assert len(made_up) == 20, "it is about 1 and stays open"
    made_up.clear()
    assert not flatout.compare(script=words, work=2.0, at_least=0.5).is_slower
    assert len(made_up) < 10, "it is clearly above 0.5"


def test_what_was_measured_once_is_not_surely_slower(made_up):
    found = flatout.compare(script=["train", "5", "--", "train", "9"], at_least=0.9)
    assert found.is_slower
    once = found.model_copy(update={"ratio": comparing.Figure(median=0.5)})
    assert (once.is_slower, once.exit_code) == (False, 0)


def test_other_losses_are_said(made_up):
    found = flatout.compare(script=["train", "5", "--", "train", "wrong", "6"])
    assert found.losses.within_tolerance is False
    assert "OUT OF TOLERANCE" in found.headline


def test_work_makes_steps_of_different_batches_comparable(made_up):
    found = flatout.compare(script=["train", "5", "--", "train", "8"], work=2.0)
    assert found.ratio.median == pytest.approx(2 * 5 / 8, rel=0.01)
    assert "by equal work" in found.headline


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("train 5 -- train 5", {}, "Both commands are the same"),
        ("train 5", {}, "no two commands"),
        ("-- train 5", {}, "no two commands"),
        ("train 5", {"against": "main"}, "not in a git repository"),
        ("train 5 -- train 6", {"against": "main"}, "compares one command with itself"),
        ("train 5 -- train 6", {"at_least": -1.0}, "at_least"),
    ],
)
def test_what_cannot_be_compared_is_an_error(made_up, words, options, message):
    with pytest.raises(ConfigError, match=message):
        flatout.compare(script=words.split(), **options)
    assert made_up == []


def test_a_command_that_fails_is_named(made_up):
    with pytest.raises(RunFailed, match="b could not be measured: ValueError: boom"):
        flatout.compare(script=["train", "5", "--", "train", "fails"])
    found = flatout.compare(script=["train", "5", "--", "train", "once", "5"])
    assert found.notes == ["b failed in one trial, which ended it: ValueError: boom."]


@pytest.mark.parametrize(("after", "code"), [(0, 130), (3, 130)])
def test_an_interruption_is_said(made_up, monkeypatch, capsys, after, code):
    plain = trial.run_command

    def interrupted(*words, **options):
        if len(made_up) >= after:
            raise KeyboardInterrupt
        return plain(*words, **options)

    monkeypatch.setattr(trial, "run_command", interrupted)
    assert cli.execute(["compare", "--", "train", "10", "--", "train", "5"]) == code
    shown = capsys.readouterr()
    assert "Interrupted" in (shown.out if after else shown.err)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.13, 7.33, "too noisy to tell"),
        (0.95, 1.04, "no measurable difference"),
        (0.28, 0.50, "as a; losses"),
    ],
)
def test_the_headline_says_what_the_interval_shows(low, high, words):
    ratio = comparing.Figure(median=low, low=low, high=high)
    known = {"path": ".", "machine": "", "wall_s": 1.0, "num_trials": 6, "sides": [], "work": 1.0}
    found = comparing.Comparison(**known, ratio=ratio, losses={}, at_least=None)
    assert words in found.headline


def git(*words, folder):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
def test_a_revision_runs_with_its_own_files_and_the_users_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "SECONDS", 0.05)
    monkeypatch.setattr(comparing, "ROUNDS", 3)
    Path("speed.py").write_text("from data import WAIT_S\n")
    Path("train.py").write_text(SCRIPT)
    Path("package").mkdir()
    Path("package/part.py").write_text("OLD = True\n")
    git("init", "-q", folder=tmp_path)
    git("add", ".", folder=tmp_path)
    git("commit", "-qm", "fast", folder=tmp_path)
    Path("data.py").write_text("WAIT_S = 0.002\n")  # what git does not know is in both
    Path("package/part.py").write_text("")
    Path("speed.py").write_text("WAIT_S = 0.02\n")
    Path("new.py").write_text("")
    git("add", "new.py", folder=tmp_path)
    with pytest.raises(ConfigError, match="no revision 'mian'"):
        flatout.compare(script=[sys.executable, "train.py"], against="mian")
    found = flatout.compare(script=[sys.executable, "train.py"], against="HEAD", at_least=0.9)
    assert found.is_slower
    assert found.sides[0].name == f"a: {sys.executable} train.py (HEAD)"
    assert "uncommitted changes" in found.notes[0]
    assert Path("speed.py").read_text() == "WAIT_S = 0.02\n"
    assert {path.name for path in tmp_path.iterdir()} >= {"new.py", "data.py"}
