"""The whole search of a recipe, with imaginary trials, and once with real ones."""

import json
from types import SimpleNamespace

import pytest
from made_up import OUT_OF_MEMORY, MadeUp

from flatout.assembly import measured
from flatout.config.schema import load_config
from flatout.errors import HardwareError, Interrupted, RunFailed
from flatout.hardware.machine import probe
from flatout.measure import moves, resolving
from flatout.measure import tune as tuning
from flatout.measure.evidence import Failure
from flatout.measure.trial import Result
from flatout.measure.tune import run_tune

pytestmark = pytest.mark.slow

HUNG = Result(failure=Failure(kind="hang", message="Hung."))


@pytest.fixture
def tune(tiny_config, tmp_path, monkeypatch):
    """Return a function that tunes a recipe whose step has 8 sequences, of which auto takes all."""

    def run(machine, *, steps=100_000, **options):
        machine.install(monkeypatch)
        auto = {"batch__rows_per_device": "auto", "speedups": "auto", "train__steps": steps}
        config = options.pop("config", None) or tiny_config(**auto)
        return run_tune(config, out=tmp_path / "tuned.yaml", **{"minutes": 60} | options)

    return run


def taken(found):
    return [row.name for row in found.changes if row.taken]


def rows_of(found):
    return {row.name: row for row in found.changes}


def test_it_finds_the_fastest_setting_and_writes_a_recipe_that_train_takes(tune, tmp_path):
    machine = MadeUp(
        speedups={"fused-adamw": 0.8, "fused-heads": 1.1}, rows={8: 1.0, 4: 1.2, 2: 1.4, 1: 1.0}
    )
    found = tune(machine)
    assert (found.best.rows_per_device, found.best.accumulate) == (2, 4)
    assert found.best.gain.median == pytest.approx(1.4 / 0.8, rel=0.03)
    assert {config.batch.tokens_per_step for config, _ in machine.trials} == {128}
    assert {"- fused-adamw", "batch.rows_per_device=2"} <= set(taken(found))
    assert "- fused-heads" not in taken(found)

    text = (tmp_path / "tuned.yaml").read_text()
    assert text.startswith("# Written by `flatout tune` on 20")
    assert "- fused-adamw" in text
    stated = load_config(tmp_path / "tuned.yaml")
    batch = stated.batch
    assert (batch.rows_per_device, batch.tokens_per_step, batch.accumulate) == (2, 128, None)
    assert stated.train.precision != "auto"
    resolved = resolving.resolve_here(stated)
    assert resolved.config.batch.accumulate == 4
    assert sorted(resolved.speedups) == sorted(stated.speedups) == sorted(found.best.speedups)


def test_nothing_changes_where_nothing_is_surely_faster(tune):
    """One setting is fast when it is measured first, and like the others from then on."""

    class FastAtFirst(MadeUp):
        def rate(self, rows, on):
            return 1300.0 if rows == 4 and len(self.trials) < 4 else 1000.0

    for machine, repeats in ((MadeUp(rows={4: 0.9}), 1), (FastAtFirst(noise=0.01), 3)):
        found = tune(machine, only=["batch"])
        assert taken(found) == []
        assert (found.best.name, found.best.gain) == ("auto", None)
        assert rows_of(found)["batch.rows_per_device=4"].repeats >= repeats
        assert "nothing that was measured is faster than auto" in found.summary()


def test_rows_beyond_slower_ones_are_not_tried(tune):
    machine = MadeUp(rows={4: 0.8})
    found = tune(machine, only=["batch"])
    assert {row.name: row.reason for row in found.not_tried} == {
        f"batch.rows_per_device={rows}": "not tried: 4 rows are slower." for rows in (2, 1)
    }


def test_close_moves_are_repeated_and_clear_ones_are_not(tune):
    machine = MadeUp(speedups={"fused-adamw": 2.0}, rows={4: 1.02})
    found = rows_of(tune(machine, only=["batch", "fused-adamw"]))
    assert found["batch.rows_per_device=4"].repeats >= 3
    assert found["- fused-adamw"].repeats == 1


@pytest.mark.parametrize(
    ("minutes", "overhead_s"),
    [(2, 5.0), (3, 5.0), (6, 5.0), (3, 20.0), (3, 35.0), (3, 60.0), (5, 20.0), (5, 60.0)],
)
def test_the_time_is_kept_however_slow_the_trials_are(tune, minutes, overhead_s):
    machine = MadeUp(
        speedups={"checkpointing": 1.6}, rows={4: 1.3, 2: 1.7, 1: 2.0}, overhead_s=overhead_s
    )
    found = tune(machine, minutes=minutes)
    assert machine.now <= 60 * minutes
    if overhead_s == 5.0:
        assert found.best.gain.median > 1.2


def test_what_the_screening_did_not_reach_is_named(tune):
    found = tune(MadeUp(overhead_s=50.0), minutes=2)
    assert any("the time was up" in each.reason for each in found.not_tried)
    assert "Add --minutes" in found.summary()


def test_a_speedup_out_of_tolerance_is_removed_and_never_added(tune):
    machine = MadeUp(speedups={"fused-adamw": 1.5}, losses={"fused-adamw": 0.5})
    found = tune(machine, only=["speedups"])
    assert "fused-adamw" not in found.best.speedups
    row = rows_of(found)["- fused-adamw"]
    assert (row.taken, row.within_tolerance) == (True, False)
    assert "OUT OF TOLERANCE" in found.summary()
    machine = MadeUp(speedups={"checkpointing": 1.5}, losses={"checkpointing": 1e-7})
    found = tune(machine, only=["checkpointing"])
    assert taken(found) == []
    assert rows_of(found)["+ checkpointing"].within_tolerance is False


@pytest.mark.parametrize(("steps", "pays"), [(200, False), (100_000, True)])
def test_compiling_counts_over_the_length_of_the_run(tune, steps, pays):
    machine = MadeUp(speedups={"compile": 1.5}, compile_s={"compile": 60.0})
    assert ("compile" in tune(machine, only=["compile"], steps=steps).best.speedups) == pays


@pytest.mark.parametrize(
    ("machine", "message", "fix"),
    [
        ({"fails": {"all": OUT_OF_MEMORY}}, r"trial failed\. .*: Out of memory", "data.seq_len"),
        ({"fails": {"all": Result(failed={"x": "Bad."})}}, "Bad.", "flatout train"),
        ({"fails": {"all": HUNG}}, "Hung.", "--minutes"),
    ],
)
def test_no_recipe_is_written_when_every_trial_fails(tune, tmp_path, machine, message, fix):
    with pytest.raises(RunFailed, match=message) as caught:
        tune(MadeUp(**machine), only=["batch", "speedups"])
    assert fix in caught.value.fix
    assert not (tmp_path / "tuned.yaml").exists()


def test_a_model_that_cannot_fit_is_rejected_without_a_trial(tune, monkeypatch):
    monkeypatch.setattr(moves, "USED_MEMORY", 1e-9)
    machine = MadeUp()
    with pytest.raises(HardwareError, match=r"Nothing fits\. .* GiB by estimate"):
        tune(machine)
    assert machine.trials == []


@pytest.mark.parametrize(
    ("error", "signal", "stops_after", "rows"),
    [
        (KeyboardInterrupt, 2, 2, 8),
        (KeyboardInterrupt, 2, 30, 4),
        (Interrupted("x.", fix="y.", signal_number=15), 15, 1, 8),
    ],
)
def test_an_interruption_writes_the_best_so_far(tune, tmp_path, error, signal, stops_after, rows):
    found = tune(MadeUp(rows={4: 1.5}, stops_after=stops_after, error=error))
    assert (found.ended_by_signal, found.best.rows_per_device) == (signal, rows)
    assert load_config(tmp_path / "tuned.yaml").batch.rows_per_device == rows
    with pytest.raises(Interrupted):
        tune(MadeUp(stops_after=0))


def test_gains_are_kept_for_auto(tune, tmp_path):
    machine = MadeUp(speedups={"fused-adamw": 0.97, "fused-heads": 0.9}, noise=0.001)
    tune(machine, cache=tmp_path / "cache", only=["fused-adamw", "fused-heads"])
    found = measured.gains_here(probe(), "cpu", tmp_path / "cache")["fused-adamw"]
    assert (found.high < 1, found.recipe) == (True, "tiny")


def test_the_gain_that_is_kept_of_compiling_is_that_of_its_steps(tune, tmp_path):
    """The time to compile counts in this run, and `auto` weighs it against the next one."""
    machine = MadeUp(speedups={"compile": 1.5}, compile_s={"compile": 2133.0})
    found = tune(machine, cache=tmp_path / "cache", only=["compile"])
    (row,) = found.changes
    assert row.gain.median == pytest.approx(1.2, rel=0.02)
    kept = measured.gains_here(probe(), "cpu", tmp_path / "cache")["compile"]
    assert kept.gain == pytest.approx(1.5, rel=0.02)


def test_a_stated_batch_is_tuned_and_said(tune, tiny_config):
    lines = []
    progress = SimpleNamespace(say=lines.append, task=tuning.SILENT.task)
    machine = MadeUp(rows={8: 1.5})
    found = tune(machine, config=tiny_config(), progress=progress, only=["batch"])
    assert found.best.rows_per_device == 8
    assert any("The recipe sets 4 rows per micro-batch" in line for line in lines)


@pytest.mark.faults
def test_real_trials(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 0.02)
    config = tiny_config(batch__rows_per_device="auto", speedups="auto,-compile", train__steps=8)
    found = run_tune(config, out=tmp_path / "tuned.yaml", only=["checkpointing"], minutes=10.0)
    assert found.best.tokens_per_s.median > 0
    assert "+ checkpointing" in rows_of(found)
    assert all(row.within_tolerance is not False for row in found.changes)
    assert json.loads(found.model_dump_json())["changes"]
