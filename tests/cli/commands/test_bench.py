"""`flatout bench`: its options and errors; tests/measure has the measurements."""

import json

import pytest

from flatout.cli import main as cli
from flatout.measure import bench as measuring
from flatout.measure.intervals import Figure
from flatout.measure.race import Row
from flatout.measure.results import Bench


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement by a sample, and record the arguments."""
    arguments = {}
    gain = Figure(median=1.01, low=0.98, high=1.04)
    rows = [Row(name="+ prefetch", kind="added", repeats=5, gain=gain)]
    facts = {"machine": "a CPU", "wall_s": 1.0, "num_trials": 10, "minutes": 6.0, "repeats": 5}
    about = {"kind": "ablation", "recipe": "mine", "config": {}}
    total = {"total": Figure(median=2.16, low=2.1, high=2.2), "total_speedup": 2.16}

    def run_bench(config, **options):
        arguments.update(options, config=config)
        number = arguments.get("ended_by")
        ended = {"complete": number is None, "ended_by_signal": number}
        return Bench(**facts, **about, **total, **ended, path=str(options["out"]), rows=rows)

    monkeypatch.setattr(measuring, "run_bench", run_bench)
    return arguments


def test_the_options_reach_the_measurement_and_the_result_is_shown(measured, capsys, tiny_set):
    words = f"bench shakespeare-char data.path={tiny_set} --sweep a=1,2 --repeats 3 --out x"
    assert cli.execute(words.split()) == 0
    shown = capsys.readouterr().out
    assert "The full set is 2.16 times as fast as the baseline (2.10 to 2.20)." in shown
    assert "none (0.98-1.04)" in shown
    assert (measured["sweep"], measured["repeats"], measured["minutes"]) == ("a=1,2", 3, None)
    assert (str(measured["out"]), measured["config"].data.path) == ("x", str(tiny_set))


@pytest.mark.parametrize(("number", "code"), [(None, 0), (2, 130), (15, 143)])
def test_json_has_all_fields_also_after_an_interruption(measured, capsys, tiny_set, number, code):
    measured["ended_by"] = number
    assert cli.execute(["bench", "shakespeare-char", f"data.path={tiny_set}", "--json"]) == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["complete"], found["ended_by_signal"]) == (number is None, number)
    assert (found["total_speedup"], found["total"]["low"]) == (2.16, 2.1)
    assert found["rows"][0]["gain"] == {"median": 1.01, "low": 0.98, "high": 1.04}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("shakespeare-chr", "shakespeare-char"),
        ("shakespeare-char", "data.path is not set"),
        ("shakespeare-char optim.lrr=1", "optim.lr"),
        ("shakespeare-char data.path=nowhere", "nowhere"),
        ("shakespeare-char data.path=SET --sweep bacth", "--sweep batch.rows_per_device=8,16"),
        ("shakespeare-char --sweep --out x", "'--sweep' requires an argument"),
        ("shakespeare-char --minutes 0", "minutes"),
        ("shakespeare-char --repeats 0", "repeats"),
    ],
)
def test_usage_errors_are_reported_before_measuring(
    words, message, capsys, tmp_path, monkeypatch, tiny_set
):
    monkeypatch.chdir(tmp_path)
    assert cli.execute(["bench", *words.replace("SET", str(tiny_set)).split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
