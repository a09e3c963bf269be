"""`flatout diagnose` on the command line; tests/measure has the measurements."""

import json
import shutil

import pytest

from flatout.cli import main as cli
from flatout.cli.commands import diagnose as command
from flatout.measure.diagnose import recipe as recipes
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.recipe import diagnose_recipe
from flatout.measure.evidence import Evidence, Failure


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
            data_wait_s=wait_s,
            compute_s=0.09,
            peak_tflops=0.2,
            peak_source="measured here",
            mfu=0.5,
            tokens_per_s=1000,
            tokens_per_step=128,
            remaining_s=600,
            notes=("No profiler.",),
        )

    def measure(config, **options):
        requested.append((config, options))
        return evidence(config)

    monkeypatch.setattr(recipes, "diagnose_recipe", measure)
    return requested


def run(*words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["diagnose", *map(str, words)])
    return stopped.value.code


def result_of(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_json_contains_verdict_shares_roofline_and_findings(measured, capsys, tiny_set):
    assert run("demo-char", f"data.path={tiny_set}", "--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1], parse_constant=lambda word: pytest.fail(word))
    assert found["verdict"] == "25% of each step waits for data."
    assert found["shares"] == {"data_wait": 0.25, "compute": 0.75}
    assert found["roofline"]["mfu"] == 0.5
    assert [finding["name"] for finding in found["findings"]] == ["slow-data"]
    assert found["notes"] == ["No profiler."]


def test_one_override_needs_no_list(measured, tiny_set):
    found = command.diagnose("demo-char", f"data.path={tiny_set}")
    assert measured[0][0].data.path == str(tiny_set)
    assert f"data.path={tiny_set}" in found.next


def test_the_summary_fits_a_terminal(measured, capsys, tiny_set):
    assert run("demo-char", f"data.path={tiny_set}", "--seconds", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("25% of each step waits for data.\nStep  120 ms: 75% compute, 25% data")
    assert "Peak  50.0% of 0.2 TFLOP/s (measured here)\n" in out
    assert "fix       Read ahead in the background: add the speedup prefetch." in out
    assert out.endswith(
        f"Next: `flatout train demo-char data.path={tiny_set} speedups=auto,-compile,+prefetch`\n"
    )
    assert "Note: No profiler." in out
    assert measured[0][1]["seconds"] == 2


@pytest.mark.parametrize(("source", "code"), [("preflight", 2), ("measured run", 1)])
def test_the_exit_code_is_that_of_training(measured, monkeypatch, tiny_set, source, code):
    failed = Evidence(
        source=source, failure=Failure(kind="error", message="It failed.", fix="Mend it.")
    )
    monkeypatch.setattr(recipes, "diagnose_recipe", lambda *_, **__: failed)
    assert run("demo-char", f"data.path={tiny_set}") == code


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ([], None, "ended after the measurement; --to-the-end lets it continue"),
        ([], 3, "failed with exit code 3"),
        (["--to-the-end"], 0, "ran to its end"),
    ],
)
def test_of_a_script_its_end_and_the_next_command_are_shown(
    monkeypatch, capsys, words, code, expected
):
    found = diagnosis_of(Evidence(source="script", steps=40, step_s=0.1, compute_s=0.1))
    monkeypatch.setattr(command, "diagnose_script", lambda *_, **__: (found, code))
    assert run(*words, "--", "python", "train.py", "a b") == 0
    out = capsys.readouterr().out
    assert "Step    100 ms, on average of 40 steps: 100% compute\n" in out
    assert f"Script  {expected}\n" in out
    assert out.endswith("Next: `flatout tune -- python train.py 'a b'`\n")


def test_a_run_is_read_and_nothing_is_written(tiny_run, capsys, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    assert run(folder, "--json") == 0
    found = result_of(capsys)
    assert (found["source"], found["script_code"]) == ("recorded run", None)
    assert {path.name for path in folder.iterdir()} == before


def test_seconds_that_nothing_measures_are_an_error(tiny_run, capsys):
    assert run("--seconds", 4) == 2
    assert "--seconds only applies to a recipe or a script" in capsys.readouterr().err
    assert run(tiny_run, "--seconds", 9) == 2
    assert f"--seconds and the records of {tiny_run} cannot be combined" in capsys.readouterr().err
    for words in (["--steps", 9], ["--to-the-end"]):
        assert run("--seconds", 9, *words, "--", "python", "train.py") == 2
        said = "--seconds and --steps or --to-the-end cannot be combined"
        assert said in capsys.readouterr().err


def test_the_files_of_a_run_cannot_control_the_terminal(tiny_run, capsys, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    hostile = json.dumps({"event": "start", "peak_source": "\x1b[2J\r", "peak_tflops": 1.0})
    events.write_text(f"{hostile}\n{events.read_text()}")
    assert run(str(tmp_path / "run")) == 0
    shown = capsys.readouterr()
    assert "\ufffd[2J\ufffd" in shown.out
    assert "\x1b" not in shown.out + shown.err


def test_a_missing_dataset_is_a_finding_and_no_error(measured):
    assert run("demo-char", "data.path=nowhere") == 0
    assert measured[0][0].data.path == "nowhere"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demo-chr",), "There is no recipe or run named 'demo-chr'."),
        (("demo-char", "model.kind=transfromer"), "'transfromer'"),
        (("runs/frist",), "There is no run directory runs/frist."),
        (("demo-char", "--fix"), "`flatout tune RECIPE --only batch,speedups`"),
    ],
)
def test_mistakes_are_reported(words, message, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.slow
def test_a_recipe_is_measured_in_a_process_of_its_own(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = diagnose_recipe(tiny_config(), seconds=0.2)
    assert found.source == "measured run"
    assert found.steps >= 5
    assert list(tmp_path.iterdir()) == []  # the scratch directory is gone
