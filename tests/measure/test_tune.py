"""The whole search, with imaginary trials, and once with real ones."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from made_up import OUT_OF_MEMORY, MadeUp

from flatout.assembly import prediction
from flatout.config.schema import load_config
from flatout.errors import ConfigError, HardwareError, Interrupted, RunFailed
from flatout.hardware.machine import probe
from flatout.measure import moves, resolving
from flatout.measure import tune as tuning
from flatout.measure.trial import Result
from flatout.measure.tune import run_tune

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tiny_config):
    """A step of 8 sequences, of which auto takes all."""
    return tiny_config(batch__rows_per_device="auto", speedups="auto", train__steps=100_000)


@pytest.fixture
def tune(monkeypatch):
    """Return a function that tunes a recipe on a made-up machine."""

    def run(config, machine, tmp_path, **options):
        machine.install(monkeypatch)
        return run_tune(config, out=tmp_path / "tuned.yaml", **{"minutes": 60} | options)

    return run


def taken(found):
    return [row.name for row in found.changes if row.taken]


def failed(status, reason):
    return Result(status=status, reason=reason)


def test_it_finds_the_fastest_setting_and_keeps_the_tokens_per_step(tune, config, tmp_path):
    machine = MadeUp(
        speedups={"fused-adamw": 0.8, "fused-heads": 1.1}, rows={8: 1.0, 4: 1.2, 2: 1.4, 1: 1.0}
    )
    found = tune(config, machine, tmp_path)
    assert (found.best.rows_per_device, found.best.accumulate) == (2, 4)
    assert "fused-adamw" not in found.best.speedups
    assert found.best.gain.median == pytest.approx(1.4 / 0.8, rel=0.03)
    assert {config.batch.tokens_per_step for config, _, _ in machine.trials} == {128}
    assert {"- fused-adamw", "batch.rows_per_device=2"} <= set(taken(found))
    assert "- fused-heads" not in taken(found)


def test_the_recipe_is_one_that_train_takes(tune, config, tmp_path):
    machine = MadeUp(speedups={"fused-adamw": 0.8}, rows={4: 1.3})
    found = tune(config, machine, tmp_path)
    text = (tmp_path / "tuned.yaml").read_text()
    assert text.startswith("# Written by `flatout tune` on 20")
    assert "- fused-adamw" in text
    stated = load_config(tmp_path / "tuned.yaml")
    batch = stated.batch
    assert (batch.rows_per_device, batch.tokens_per_step, batch.accumulate) == (4, 128, None)
    assert stated.train.precision != "auto"
    resolved = resolving.resolve_here(stated)
    assert resolved.config.batch.accumulate == 2
    assert sorted(resolved.speedups) == sorted(stated.speedups) == sorted(found.best.speedups)


def test_nothing_changes_where_nothing_is_faster(tune, config, tmp_path):
    found = tune(config, MadeUp(rows={4: 0.9}), tmp_path)
    assert taken(found) == []
    assert found.best.name == found.start == "auto"
    assert found.best.gain is None
    assert "nothing that was measured is faster than auto" in (tmp_path / "tuned.yaml").read_text()


def test_close_moves_are_repeated_and_clear_ones_are_not(tune, config, tmp_path):
    machine = MadeUp(speedups={"fused-adamw": 2.0}, rows={4: 1.02})
    found = tune(config, machine, tmp_path, only=["batch", "fused-adamw"])
    repeats = {row.name: row.repeats for row in found.changes}
    assert repeats["batch.rows_per_device=4"] >= 3
    assert repeats["- fused-adamw"] == 1


@pytest.mark.parametrize(
    ("minutes", "overhead_s"),
    [(2, 5.0), (3, 5.0), (6, 5.0), (3, 20.0), (3, 35.0), (3, 60.0), (5, 20.0), (5, 60.0)],
)
def test_the_winner_is_rehearsed_in_time_however_slow_the_trials_are(
    tune, config, tmp_path, minutes, overhead_s
):
    machine = MadeUp(
        speedups={"checkpointing": 1.6}, rows={4: 1.3, 2: 1.7, 1: 2.0}, overhead_s=overhead_s
    )
    found = tune(config, machine, tmp_path, minutes=minutes)
    assert machine.now <= 60 * minutes
    assert found.is_rehearsed
    assert "No save was rehearsed" not in (tmp_path / "tuned.yaml").read_text()
    if overhead_s == 5.0:
        assert found.best.gain.median > 1.2


def test_what_there_was_no_time_for_is_listed(tune, config, tmp_path):
    found = tune(config, MadeUp(overhead_s=50.0), tmp_path, minutes=2)
    assert any("the time was up" in each.reason for each in found.not_tried)
    assert found.is_rehearsed


def test_time_that_the_winners_leave_is_for_what_the_screening_did_not_reach(
    tune, config, tmp_path
):
    machine = MadeUp(speedups={"fused-heads": 0.5}, overhead_s=10.0)
    found = tune(config, machine, tmp_path, minutes=7, only=["speedups"])
    late = {each.name for each in found.not_tried if "the time was up" in each.reason}
    assert late.isdisjoint(choice.name for choice in found.changes)
    assert machine.now > 0.8 * 7 * 60 or not late


def test_a_change_without_a_measurable_gain_is_not_taken(tune, config, tmp_path):
    """One setting is fast when it is measured first, and like the others from then on."""

    class FastAtFirst(MadeUp):
        def rate(self, rows, on):
            return 1300.0 if rows == 4 and len(self.trials) < 4 else 1000.0

    found = tune(config, FastAtFirst(noise=0.01), tmp_path, only=["batch"])
    assert taken(found) == []
    assert found.best.name == "auto"
    assert found.is_rehearsed
    repeats = {row.name: row.repeats for row in found.changes}
    assert repeats["batch.rows_per_device=4"] >= 3


def test_a_speedup_out_of_tolerance_is_removed(tune, config, tmp_path):
    machine = MadeUp(speedups={"fused-adamw": 1.5}, losses={"fused-adamw": 0.5})
    found = tune(config, machine, tmp_path, only=["speedups"])
    assert "fused-adamw" not in found.best.speedups
    choice = next(choice for choice in found.changes if choice.name == "- fused-adamw")
    assert (choice.taken, choice.within_tolerance) == (True, False)
    assert "OUT OF TOLERANCE" in found.summary()

    machine = MadeUp(speedups={"checkpointing": 1.5}, losses={"checkpointing": 1e-7})
    found = tune(config, machine, tmp_path, only=["checkpointing"])
    assert taken(found) == []
    broken = [row.name for row in found.changes if row.within_tolerance is False]
    assert broken == ["+ checkpointing"]


@pytest.mark.parametrize(("steps", "pays"), [(200, False), (100_000, True)])
def test_compiling_counts_over_the_length_of_the_run(tune, config, tmp_path, steps, pays):
    machine = MadeUp(speedups={"compile": 1.5}, compile_s={"compile": 60.0})
    run = config.with_values({"train.steps": steps})
    assert ("compile" in tune(run, machine, tmp_path, only=["compile"]).best.speedups) == pays


def test_the_first_rows_that_fit_are_the_start_when_auto_runs_out_of_memory(tune, config, tmp_path):
    machine = MadeUp(rows={8: 9.0, 4: 2.0}, fits=lambda rows, on, besides: rows <= 2)
    found = tune(config, machine, tmp_path, only=["batch"])
    assert found.start == "batch.rows_per_device=2"
    assert found.best.rows_per_device == 2
    rows = [trial[0].batch.rows_per_device for trial in machine.trials]
    assert rows.count(8) == rows.count(4) == 1


def test_checkpointing_makes_room_where_not_even_one_row_fits(tune, config, tmp_path):
    machine = MadeUp(fits=lambda rows, on, besides: rows == 1 and "checkpointing" in on)
    best = tune(config, machine, tmp_path).best
    assert (best.rows_per_device, "checkpointing" in best.speedups) == (1, True)


@pytest.mark.parametrize(
    ("start", "kept", "gain"), [("auto", 8, 1.5), ("batch.rows_per_device=4", 4, 0.8)]
)
def test_a_setting_that_fails_at_the_first_save_gives_way(
    tune, config, tmp_path, start, kept, gain
):
    machine = MadeUp(rows={4: gain}, fits=lambda rows, on, besides: rows == kept or not besides)
    found = tune(config, machine, tmp_path, only=["batch"])
    assert (found.start, found.best.rows_per_device) == (start, kept)
    assert found.is_rehearsed


def test_the_winner_alone_is_rehearsed(tune, config, tmp_path):
    machine = MadeUp(rows={4: 1.3, 2: 1.6})
    assert tune(config, machine, tmp_path, only=["batch"]).is_rehearsed
    rehearsed = [config for config, _, besides in machine.trials if besides]
    assert [config.batch.rows_per_device for config in rehearsed] == [2]


@pytest.mark.parametrize(
    ("machine", "message", "fix"),
    [
        ({"fails": {"all": OUT_OF_MEMORY}}, r"trials failed\. .*: Out of memory", "data.seq_len"),
        ({"fails": {"all": failed("failed", "It broke.")}}, "It broke.", "flatout train"),
        ({"fails": {"all": failed("timed-out", "It hung.")}}, "It hung.", "--minutes"),
        ({"fits": lambda rows, on, besides: not besides}, "Nothing was measured", ""),
    ],
)
def test_no_recipe_is_written_when_every_trial_fails(tune, config, tmp_path, machine, message, fix):
    with pytest.raises(RunFailed, match=message) as caught:
        tune(config, MadeUp(**machine), tmp_path, only=["batch", "speedups"])
    assert fix in caught.value.fix
    assert not (tmp_path / "tuned.yaml").exists()


def test_a_model_that_cannot_fit_is_rejected_without_a_trial(tune, config, tmp_path, monkeypatch):
    monkeypatch.setattr(moves, "USED_MEMORY", 1e-9)
    machine = MadeUp()
    with pytest.raises(HardwareError, match=r"Nothing fits\. .* GiB by estimate"):
        tune(config, machine, tmp_path)
    assert machine.trials == []


@pytest.mark.parametrize(
    ("error", "signal", "stops_after", "rows"),
    [
        (KeyboardInterrupt, 2, 2, 8),
        (KeyboardInterrupt, 2, 30, 4),
        (Interrupted("x.", fix="y.", signal_number=15), 15, 1, 8),
    ],
)
def test_an_interruption_writes_the_best_so_far(
    tune, config, tmp_path, error, signal, stops_after, rows
):
    found = tune(config, MadeUp(rows={4: 1.5}, stops_after=stops_after, error=error), tmp_path)
    assert (found.ended_by_signal, found.best.rows_per_device) == (signal, rows)
    assert load_config(tmp_path / "tuned.yaml").batch.rows_per_device == rows
    with pytest.raises(Interrupted):
        tune(config, MadeUp(stops_after=0), tmp_path)


def test_gains_are_kept_for_auto(tune, config, tmp_path):
    machine = MadeUp(speedups={"fused-adamw": 0.97, "fused-heads": 0.9}, noise=0.001)
    cache = tmp_path / "cache"
    tune(config, machine, tmp_path, cache=cache, only=["fused-adamw", "fused-heads"])
    found = prediction.gains_here(probe(), "cpu", cache)["fused-adamw"]
    assert found.high < 1
    assert found.recipe == config.name


def test_a_stated_batch_is_tuned_and_said(tune, tiny_config, tmp_path):
    lines = []
    progress = SimpleNamespace(say=lines.append, task=tuning.SILENT.task)
    machine = MadeUp(rows={8: 1.5})
    found = tune(tiny_config(), machine, tmp_path, progress=progress, only=["batch"])
    assert found.best.rows_per_device == 8
    assert any("The recipe sets 4 rows per micro-batch" in line for line in lines)


def test_a_file_of_another_program_is_not_replaced(tune, config, tmp_path):
    (tmp_path / "tuned.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match="did not write it"):
        tune(config, MadeUp(), tmp_path)
    (tmp_path / "other").write_text("")
    with pytest.raises(ConfigError, match="Cannot write"):
        run_tune(config, out=tmp_path / "other" / "tuned.yaml")


@pytest.mark.faults
def test_real_trials(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 0.02)
    config = tiny_config(batch__rows_per_device="auto", speedups="auto,-compile", train__steps=8)
    found = run_tune(config, out=tmp_path / "tuned.yaml", only=["checkpointing"], minutes=10.0)
    assert found.is_rehearsed
    assert found.best.tokens_per_s.median > 0
    assert "+ checkpointing" in {row.name for row in found.changes}
    assert all(row.within_tolerance is not False for row in found.changes)
    assert json.loads(found.model_dump_json())["changes"]
