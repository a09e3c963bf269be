"""The ablation and its results, with imaginary trials, and once with real ones."""

from __future__ import annotations

import itertools
import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from made_up import SLOW, MadeUp

from flatout.config.registry import SPEEDUPS
from flatout.errors import ConfigError, Interrupted, RunFailed, Terminated
from flatout.measure.experiments.bench import run_bench
from flatout.measure.experiments.losses import Trials
from flatout.measure.experiments.records import TrialResult
from flatout.measure.experiments.report import Bench
from flatout.storage.json_io import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def auto_config(tiny_config):
    return tiny_config(batch__rows_per_device="auto", speedups="auto")


def read(place):
    return Bench.model_validate_json((place / "bench.json").read_text())


def bench(config, made_up, tmp_path, **limits):
    out = tmp_path / "bench"
    return run_bench(config, out=out, trial=made_up, clock=made_up.clock, **limits), out


def test_repeats_are_interleaved_and_a_round_shares_its_seed(auto_config, tmp_path):
    made_up = MadeUp()
    report, _ = bench(auto_config, made_up, tmp_path, repeats=3)
    rounds = [[each for each in report.trials if each.round == n] for n in range(3)]
    orders = [tuple(trial.point for trial in trials) for trials in rounds]
    assert len(set(orders)) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert len(set(orders[0])) == len(orders[0])
    assert [{trial.seed for trial in trials} for trials in rounds] == [{0}, {1}, {2}]
    assert [spec.config["train"]["seed"] for spec in made_up.specs] == [
        trial.seed for trial in report.trials
    ]
    assert len({spec.folder for spec in made_up.specs}) == len(made_up.specs)


def test_equal_sets_are_measured_once(auto_config, tmp_path):
    report, _ = bench(auto_config, MadeUp(), tmp_path, repeats=1)
    rows = {row.name: row for row in report.rows}
    last, below = [row for row in report.rows if row.kind == "added"][:-3:-1]
    assert rows[f"all but {last.speedup}"].tokens_per_s == below.tokens_per_s
    sets = [json.dumps(spec) for spec in {tuple(trial.result.speedups) for trial in report.trials}]
    assert len(sets) == len(report.trials)


def test_gains_are_found_and_written(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(), tmp_path)
    rows = {row.name: row for row in report.rows}
    for name, gain in SLOW.items():
        assert rows[f"+ {name}"].gain.median == pytest.approx(gain, rel=0.05)
        assert rows[f"all but {name}"].gain.low > 1
    assert rows["+ prefetch"].verdict == "no measurable gain"
    assert rows["+ prefetch"].within_tolerance is True
    assert any(note.startswith("In 1 of ") for note in report.notes)
    assert report.total_speedup == pytest.approx(1.3 * 2.0 * 1.2, rel=0.05)
    assert report.repeats == 5
    files = {path.name for path in place.iterdir()}
    assert files == {"bench.json", "bench.svg", "table.md", "trials.jsonl"}
    assert read(place) == report
    assert report.config["speedups"] == "auto"
    ElementTree.fromstring((place / "bench.svg").read_text())


def test_the_time_limit_is_kept_and_unreached_points_are_listed(auto_config, tmp_path):
    made_up = MadeUp(overhead_s=20.0)
    report, _ = bench(auto_config, made_up, tmp_path, minutes=3)
    assert made_up.now <= 180
    assert any(row.status == "not-measured" and "time was up" in row.reason for row in report.rows)
    assert any("speedups=auto,-NAME" in note for note in report.notes)
    made_up = MadeUp(overhead_s=4.0)
    report, _ = bench(auto_config, made_up, tmp_path, minutes=6)
    assert made_up.now <= 360
    assert min(row.repeats for row in report.rows if row.kind not in {"absent", "add-one"}) >= 2
    limits = {"minutes": 1, "sweep": "prefetch"}
    report, _ = bench(auto_config, MadeUp(overhead_s=20.0), tmp_path / "sweep", **limits)
    assert any("--minutes" in note for note in report.notes)
    assert not any("speedups=" in note for note in report.notes)


def test_only_statistical_tolerances_record_losses_after_the_first_round(auto_config, tmp_path):
    made_up = MadeUp()
    report, _ = bench(auto_config, made_up, tmp_path, repeats=2)
    half = len(made_up.specs) // 2
    assert {spec.loss_steps for spec in made_up.specs[:half]} == {20}
    full = [row.name for row in report.rows if row.kind == "added"][-1]
    over_seeds = {
        row.name
        for row in report.rows
        if row.kind == "add-one" and SPEEDUPS.get(row.speedup).tolerance.kind == "statistical"
    }
    assert "all and length-buckets" in over_seeds
    for trial, spec in zip(report.trials[half:], made_up.specs[half:], strict=True):
        assert spec.loss_steps == (20 if trial.point in {full, *over_seeds} else 0), trial.point


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The configuration is that of a CPU; the trials never repeat bit for bit."""
    monkeypatch.setattr(Trials, "of", lambda config: Trials([], config.train.deterministic))


def test_deterministic_runs_decide_exact_tolerances_where_runs_do_not_repeat(
    auto_config, tmp_path, on_a_gpu
):
    made_up = MadeUp(is_gpu=True)
    report, place = bench(auto_config, made_up, tmp_path, repeats=2)
    exact = [row for row in report.rows if row.tolerance == "exact"]
    assert len(exact) > 6
    assert {(row.within_tolerance, row.deterministic, row.compared_losses) for row in exact} == {
        (True, True, 10)
    }
    apart = [
        (trial, spec)
        for trial, spec in zip(report.trials, made_up.specs, strict=True)
        if trial.deterministic
    ]
    points = [trial.point for trial, _ in apart]
    assert len(set(points)) == len(points), "each point once"
    for trial, spec in apart:
        assert trial.seed == auto_config.train.seed
        assert spec.config["train"]["deterministic"]
        assert (spec.loss_steps, spec.seconds, spec.warmup_s) == (10, 0.0, 0.0)
    assert {row.repeats for row in report.rows if row.repeats} == {2}
    assert (
        "equal over 10 with train.deterministic, within tolerance (exact)"
        in (place / "table.md").read_text()
    )
    assert any("train.deterministic=true" in note for note in report.notes)
    assert not any(row.deterministic for row in report.rows if row.tolerance != "exact")

    stated = auto_config.with_values({"train.deterministic": True})
    report, _ = bench(stated, MadeUp(is_gpu=True), tmp_path / "stated", repeats=1)
    assert not any(trial.deterministic for trial in report.trials)
    assert all(row.within_tolerance for row in report.rows if row.tolerance == "exact")


def test_a_short_bench_prefers_repeats_to_exact_tolerances(auto_config, tmp_path, on_a_gpu):
    made_up = MadeUp(overhead_s=20.0, is_gpu=True)
    report, _ = bench(auto_config, made_up, tmp_path, minutes=12)
    assert made_up.now <= 12 * 60
    timed = itertools.takewhile(lambda trial: not trial.deterministic, report.trials)
    assert {trial.round for trial in timed} >= {0, 1}
    judged = [row for row in report.rows if row.tolerance == "exact"]
    assert all(row.within_tolerance is not False for row in judged)
    assert all("no time" in row.tolerance_reason for row in judged if row.within_tolerance is None)


def test_extras_come_in_the_third_round_and_only_there_if_they_fail(auto_config, tmp_path):
    gone = TrialResult(status="timed-out", reason="It took too long.")
    made_up = MadeUp(overhead_s=4.0, fails={"compile": gone})
    report, _ = bench(auto_config, made_up, tmp_path, minutes=30)
    extras = [row for row in report.rows if row.kind == "add-one" and row.status == "ok"]
    assert min(trial.round for trial in report.trials if trial.point == extras[0].name) == 2
    assert all(row.within_tolerance is not None for row in extras), (
        "their losses and the full set's"
    )
    assert report.repeats > 3
    assert [trial.round for trial in report.trials if trial.point == "all and compile"] == [2]


def test_a_failure_is_a_row_and_the_ablation_continues(auto_config, tmp_path):
    gone = TrialResult(status="out-of-memory", reason="Out of memory at step 0: it needs more.")
    report, _ = bench(auto_config, MadeUp(fails={"onednn": gone}), tmp_path, repeats=3)
    rows = {row.name: row for row in report.rows}
    assert rows["+ onednn"].status == "out-of-memory"
    assert rows["all but onednn"].status == "ok"
    assert rows["+ micro-batch"].repeats == 3
    assert report.total_speedup is None
    assert sum(trial.point == "+ onednn" for trial in report.trials) == 1


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, Terminated(15), Interrupted("x.", fix="y.", signal_number=15)]
)
def test_an_interruption_keeps_the_trials(auto_config, tmp_path, error):
    report, place = bench(auto_config, MadeUp(stops_after=4, error=error), tmp_path)
    assert not report.complete
    assert report.ended_by_signal == (2 if error is KeyboardInterrupt else 15)
    assert len(report.trials) == 4
    assert read(place) == report
    assert "interrupted" in report.notes[0]
    assert next(row.name for row in report.rows if row.status == "ok") == "baseline"


def test_an_interrupted_bench_does_not_replace_a_better_one(auto_config, tmp_path):
    with pytest.raises(Interrupted, match="before any trial had a result") as stopped:
        bench(auto_config, MadeUp(stops_after=0), tmp_path)
    assert stopped.value.exit_code == 130
    assert not (tmp_path / "bench").exists()
    report, place = bench(auto_config, MadeUp(), tmp_path, repeats=1)
    later, _ = bench(auto_config, MadeUp(stops_after=2), tmp_path)
    assert (len(later.trials), later.complete) == (2, False)
    assert read(place) == report
    assert len(list(read_lines(place / "trials.jsonl"))) == len(report.trials) + 2


def test_an_unwritable_directory_is_reported_before_measuring(auto_config, tmp_path):
    (tmp_path / "bench").write_text("")
    made_up = MadeUp()
    with pytest.raises(ConfigError, match="Cannot write"):
        run_bench(auto_config, out=tmp_path / "bench" / "x", trial=made_up, clock=made_up.clock)
    assert not made_up.specs


def test_a_trial_is_on_disk_as_soon_as_it_ends(auto_config, tmp_path):
    """Look at the files from inside a trial, since a killed process cannot."""
    made_up, seen, file = MadeUp(), [], tmp_path / "bench" / "trials.jsonl"

    def watched(spec, timeout_s):
        seen.append(len(list(read_lines(file))))
        if len(seen) > 3:
            raise SystemError("as good as killed")
        return made_up(spec, timeout_s)

    with pytest.raises(SystemError):
        run_bench(auto_config, out=tmp_path / "bench", trial=watched, clock=made_up.clock)
    assert seen == [0, 1, 2, 3]
    lines = list(read_lines(file))
    assert lines[0]["point"] == "baseline"
    assert lines[0]["result"]["tokens_per_s"] > 0
    assert lines[0]["bench"] == ["tiny", "ablation", auto_config.digest()]
    report, _ = bench(auto_config, MadeUp(), tmp_path, repeats=1)
    kept = list(read_lines(file))
    assert kept[:3] == lines, "a second bench appends to them"
    assert [line["point"] for line in kept[3:]] == [trial.point for trial in report.trials]
    with pytest.raises(ConfigError, match="contains the bench of"):
        bench(auto_config.with_values({"train.seed": 3}), MadeUp(), tmp_path)


def test_failures_are_written_when_every_trial_fails(auto_config, tmp_path):
    def broken(spec, timeout_s):
        return TrialResult(status="failed", reason="It fell over.")

    with pytest.raises(RunFailed, match="Nothing was measured: baseline: It fell over"):
        run_bench(auto_config, out=tmp_path / "bench", trial=broken, repeats=2)
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["trials.jsonl"]


def test_the_shortest_bench_finds_the_total_if_there_is_one(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(overhead_s=20.0), tmp_path, minutes=0.8)
    full = [row for row in report.rows if row.kind == "added"][-1].name
    assert [trial.point for trial in report.trials] == ["baseline", full]
    assert "is unsure: too few repeats." in (place / "table.md").read_text()
    plain = auto_config.with_values({"speedups": "none"})
    assert bench(plain, MadeUp(), tmp_path / "plain", repeats=2)[0].total_speedup is None


def test_a_sweep_is_measured_like_an_ablation(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(), tmp_path, sweep="prefetch", repeats=2)
    assert (report.kind, report.total_speedup) == ("prefetch", None)
    assert [row.name for row in report.rows] == [
        "no prefetch",
        "1 step ahead",
        *(f"{steps} steps ahead" for steps in (2, 4, 8)),
    ]
    assert "gain" not in (place / "table.md").read_text()


def test_a_speedup_out_of_tolerance_is_caught_in_real_trials(tiny_config, tmp_path, monkeypatch):
    """Real trials, in this process: a loss that is a little wrong exceeds an exact tolerance."""
    (tmp_path / "alittleoff.py").write_text(
        "from flatout.ops.cross_entropy import fused\n"
        "from flatout.assembly.recipe import Tolerance, Speedup\n"
        "def off(*arguments, **named):\n"
        "    loss_sum, num_valid = fused(*arguments, **named)\n"
        "    return loss_sum * (1 + 1e-5), num_valid\n"
        "SPEEDUP = Speedup(name='alittleoff:SPEEDUP', saves='', tolerance=Tolerance.exact(), "
        "fills={'ops.cross_entropy': off})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny_config(speedups="prefetch,alittleoff:SPEEDUP")
    report = run_bench(config, repeats=1, out=tmp_path / "bench", trial=quick)
    rows = {row.name: row for row in report.rows}
    assert {row.status for row in report.rows if row.kind != "absent"} == {"ok"}, [
        row.reason for row in report.rows
    ]
    assert rows["+ alittleoff:SPEEDUP"].within_tolerance is False
    assert rows["+ alittleoff:SPEEDUP"].loss_difference == pytest.approx(1e-5, rel=0.2)
    assert rows["+ prefetch"].within_tolerance is True
    assert "**out of tolerance (exact)**" in (tmp_path / "bench" / "table.md").read_text()
    assert not (tmp_path / "runs").exists()
    sys.modules.pop("alittleoff")


def quick(spec, _timeout_s):
    from flatout.measure.experiments.trial import measured

    return measured(spec.model_copy(update={"seconds": 0.02, "warmup_s": 0.1}))
