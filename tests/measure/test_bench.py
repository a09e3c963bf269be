"""The ablation and its results, with imaginary trials, and once with real ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from made_up import OUT_OF_MEMORY, MadeUp

from flatout.assembly.prediction import past_run, predict_time, read, runs_here
from flatout.assembly.resolve import flops_per_token, resolve
from flatout.assembly.selection import Decision
from flatout.cli.commands.bench import Sweep
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, Interrupted, RunFailed, Terminated
from flatout.hardware import machine as hardware
from flatout.hardware.machine import Gpu, Machine
from flatout.measure import bench as benching
from flatout.measure import output
from flatout.measure.bench import SWEEPS, precisions, remember, results_dir, run_bench
from flatout.measure.race import Figure
from flatout.measure.resolving import resolve_here
from flatout.measure.results import Bench, Row
from flatout.measure.trial import Result
from flatout.storage.json_io import read_lines

pytestmark = pytest.mark.slow

SLOW = {"pretokenised": 1.3, "micro-batch": 2.0, "onednn": 1.2}
"""The gains of speedups on the made-up machine; all others gain nothing."""
CONFIG = load_config("shakespeare-char")


@pytest.fixture
def auto_config(tiny_config):
    return tiny_config(batch__rows_per_device="auto", speedups="auto")


def read_bench(place):
    return Bench.model_validate_json((place / "bench.json").read_text())


def bench(config, made_up, tmp_path, **limits):
    out = tmp_path / "bench"
    return run_bench(config, out=out, trial=made_up, clock=made_up.clock, **limits), out


def trials_of(place):
    return list(read_lines(place / "trials.jsonl"))


def test_repeats_are_interleaved_and_a_round_shares_its_seed(auto_config, tmp_path):
    made_up = MadeUp()
    _, place = bench(auto_config, made_up, tmp_path, repeats=3)
    rounds = [[each for each in trials_of(place) if each["round"] == n] for n in (1, 2, 3)]
    orders = [tuple(trial["point"] for trial in trials) for trials in rounds]
    assert len(set(orders)) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert len(set(orders[0])) == len(orders[0])
    seeds = [config.train.seed - auto_config.train.seed for config, _, _ in made_up.trials]
    assert seeds == [0] * len(orders[0]) + [1] * len(orders[0]) + [2] * len(orders[0])


def test_equal_sets_are_measured_once(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(), tmp_path, repeats=1)
    rows = {row.name: row for row in report.rows}
    last, below = [row for row in report.rows if row.kind == "added"][:-3:-1]
    assert rows[f"all but {last.speedup}"].tokens_per_s == below.tokens_per_s
    points = [trial["point"] for trial in trials_of(place)]
    assert len(set(points)) == len(points) == report.num_trials


def test_gains_are_found_and_written(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(speedups=SLOW), tmp_path)
    rows = {row.name: row for row in report.rows}
    for name, gain in SLOW.items():
        assert rows[f"+ {name}"].gain.median == pytest.approx(gain, rel=0.05)
        assert rows[f"all but {name}"].gain.low > 1
    assert rows["+ prefetch"].gain.gain().startswith("no measurable gain")
    assert rows["+ prefetch"].within_tolerance is True
    assert any(note.startswith("In 1 of ") for note in report.notes)
    assert report.total.median == pytest.approx(1.3 * 2.0 * 1.2, rel=0.05)
    assert report.repeats == 5
    assert {path.name for path in place.iterdir()} == {"bench.json", "table.md", "trials.jsonl"}
    assert read_bench(place) == report
    assert report.config["speedups"] == "auto"
    assert "| + micro-batch |" in (place / "table.md").read_text()


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


def test_extras_come_in_the_third_round_and_only_there_if_they_fail(auto_config, tmp_path):
    gone = Result(status="failed", reason="It took too long.")
    made_up = MadeUp(overhead_s=4.0, fails={"compile": gone})
    report, place = bench(auto_config, made_up, tmp_path, minutes=30)
    extras = [row for row in report.rows if row.kind == "add-one" and row.status == "ok"]
    trials = trials_of(place)
    assert min(trial["round"] for trial in trials if trial["point"] == extras[0].name) == 3
    assert report.repeats > 3
    assert [trial["round"] for trial in trials if trial["point"] == "all and compile"] == [3]


def test_a_failure_is_a_row_and_the_ablation_continues(auto_config, tmp_path):
    made_up = MadeUp(fails={"onednn": OUT_OF_MEMORY})
    report, place = bench(auto_config, made_up, tmp_path, repeats=3)
    rows = {row.name: row for row in report.rows}
    assert rows["+ onednn"].status == "out-of-memory"
    assert rows["all but onednn"].status == "ok"
    assert rows["+ micro-batch"].repeats == 3
    assert report.total is None
    assert sum(trial["point"] == "+ onednn" for trial in trials_of(place)) == 1


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, Terminated(15), Interrupted("x.", fix="y.", signal_number=15)]
)
def test_an_interruption_keeps_the_trials(auto_config, tmp_path, error):
    report, place = bench(auto_config, MadeUp(stops_after=4, error=error), tmp_path)
    assert not report.complete
    assert report.ended_by_signal == (2 if error is KeyboardInterrupt else 15)
    assert len(trials_of(place)) == report.num_trials == 4
    assert read_bench(place) == report
    assert "interrupted" in report.notes[0]
    assert next(row.name for row in report.rows if row.status == "ok") == "baseline"


def test_an_interruption_before_any_result_leaves_nothing(auto_config, tmp_path):
    with pytest.raises(Interrupted, match="before any trial had a result") as stopped:
        bench(auto_config, MadeUp(stops_after=0), tmp_path)
    assert stopped.value.exit_code == 130
    assert not (tmp_path / "bench").exists()


def test_an_unwritable_directory_is_reported_before_measuring(auto_config, tmp_path):
    (tmp_path / "bench").write_text("")
    made_up = MadeUp()
    with pytest.raises(ConfigError, match="Cannot write"):
        run_bench(auto_config, out=tmp_path / "bench" / "x", trial=made_up, clock=made_up.clock)
    assert not made_up.trials


def test_a_trial_is_on_disk_as_soon_as_it_ends(auto_config, tmp_path):
    """Look at the files from inside a trial, since a killed process cannot."""
    made_up, seen, place = MadeUp(), [], tmp_path / "bench"

    def watched(*words):
        seen.append(len(trials_of(place)))
        if len(seen) > 3:
            raise SystemError("as good as killed")
        return made_up(*words)

    with pytest.raises(SystemError):
        run_bench(auto_config, out=place, trial=watched, clock=made_up.clock)
    assert seen == [0, 1, 2, 3]
    lines = trials_of(place)
    assert lines[0]["point"] == "baseline"
    assert lines[0]["result"]["step_s"]
    assert lines[0]["bench"] == ["tiny", "ablation", auto_config.digest()]
    bench(auto_config, MadeUp(), tmp_path, repeats=1)
    assert trials_of(place)[:3] == lines, "a second bench appends to them"


def test_failures_are_written_when_every_trial_fails(auto_config, tmp_path):
    broken = MadeUp(fails={"all": Result(status="failed", reason="It fell over.")})
    with pytest.raises(RunFailed, match="Nothing was measured: baseline: It fell over"):
        bench(auto_config, broken, tmp_path, repeats=2)
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["trials.jsonl"]


def test_the_shortest_bench_finds_the_total_if_there_is_one(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(overhead_s=20.0), tmp_path, minutes=0.8)
    full = [row for row in report.rows if row.kind == "added"][-1].name
    assert [trial["point"] for trial in trials_of(place)] == ["baseline", full]
    assert "is unsure: too few repeats." in (place / "table.md").read_text()
    plain = auto_config.with_values({"speedups": "none"})
    assert bench(plain, MadeUp(), tmp_path / "plain", repeats=2)[0].total is None


def test_a_speedup_out_of_tolerance_is_shown(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(losses={"onednn": 0.1}), tmp_path, repeats=1)
    row = next(row for row in report.rows if row.name == "+ onednn")
    assert (row.tolerance, row.within_tolerance) == ("rounding", False)
    assert "OUT OF TOLERANCE" in (place / "table.md").read_text()
    assert "OUT OF TOLERANCE" in report.summary()


def test_a_sweep_is_measured_like_an_ablation(auto_config, tmp_path):
    report, place = bench(auto_config, MadeUp(), tmp_path, sweep="prefetch", repeats=2)
    assert (report.kind, report.total) == ("prefetch", None)
    assert [row.name for row in report.rows] == [
        "no prefetch",
        "1 step ahead",
        *(f"{steps} steps ahead" for steps in (2, 4, 8)),
    ]
    assert "gain" not in (place / "table.md").read_text()


def test_real_trials_catch_a_loss_that_is_a_little_wrong(tiny_config, tmp_path, monkeypatch):
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
    monkeypatch.setattr(benching, "SECONDS", 0.02)
    config = tiny_config(speedups="alittleoff:SPEEDUP")
    report = run_bench(config, repeats=1, out=tmp_path / "bench")
    rows = {row.name: row for row in report.rows}
    assert {row.status for row in report.rows} == {"ok"}, [row.reason for row in report.rows]
    assert rows["+ alittleoff:SPEEDUP"].within_tolerance is False
    assert rows["+ alittleoff:SPEEDUP"].loss_difference == pytest.approx(1e-5, rel=0.2)
    assert (rows["baseline"].rows_per_device, rows["baseline"].accumulate) == (4, 2)
    assert rows["baseline"].data_ms > 0
    assert report.environment["device"] == "cpu"
    assert not (tmp_path / "runs").exists()
    sys.modules.pop("alittleoff")


def test_results_get_their_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = results_dir(CONFIG, "ablation", None)
    assert first.parts[0] == "bench"
    assert first.name.startswith("shakespeare-char-")
    for expected in (first, first.with_name(f"{first.name}-2"), first.with_name(f"{first.name}-3")):
        assert results_dir(CONFIG, "ablation", None) == expected
        expected.mkdir(parents=True)
    assert results_dir(CONFIG, "batch", None).name == f"{first.name}-batch"


def test_a_directory_with_other_files_is_rejected(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="contains other files"):
        results_dir(CONFIG, "ablation", tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        results_dir(CONFIG, "ablation", tmp_path / "thesis.txt")
    assert results_dir(CONFIG, "ablation", tmp_path / "new") == tmp_path / "new"
    (tmp_path / "bench.json").touch()
    assert results_dir(CONFIG, "ablation", tmp_path) == tmp_path


def test_there_is_no_commit_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "PACKAGE_DIR", tmp_path)
    assert output.commit_of_package() is None


MACHINE = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")
FOUND = SimpleNamespace(recipe="mine", began="now", commit="abc", environment={"torch": "2.13.0"})


def row(name, kind, low, high, **more):
    gain = Figure(median=(low + high) / 2, low=low, high=high)
    rate = Figure(median=1000.0, low=990.0, high=1010.0)
    return Row(name=name, kind=kind, gain=gain, tokens_per_s=rate, **more)


def recipe_on(device, on=("bf16",)):
    decisions = [Decision(name, True, "") for name in on]
    config = load_config(None, [f"train.device={device}"])
    return SimpleNamespace(config=config, decisions=decisions, machine=MACHINE)


def test_the_gain_in_the_full_set_counts_most_and_wrong_ones_not_at_all(tmp_path):
    rows = [
        row("+ a", "added", 2.0, 2.2, speedup="prefetch"),
        row("all but a", "leave-one-out", 1.0, 1.2, speedup="prefetch"),
        row("+ b", "added", 2.0, 2.2, speedup="tf32", within_tolerance=False),
        row("- c", "change", 0.5, 0.5, speedup="compile", leaves_out=True),
        Row(name="+ d", kind="added", speedup="fp16", gain=Figure(median=3.0)),
    ]
    remember(rows, FOUND, recipe_on("cpu"), tmp_path)
    found = {
        key.partition("@")[0]: gain
        for key, gain in read("a CPU, 2 cores", tmp_path).speedups.items()
    }
    assert set(found) == {"prefetch", "compile"}
    assert (found["prefetch"].gain, found["prefetch"].where) == (1.1, "in the full set")
    assert found["compile"].gain == 2.0
    flops = flops_per_token(recipe_on("cpu").config)
    assert (found["prefetch"].recipe, found["prefetch"].flops_per_token) == ("mine", flops)


def test_gains_are_stored_for_the_hardware_that_measured(tmp_path):
    rows = [row("+ a", "added", 2.0, 2.2, speedup="prefetch")]
    remember(rows, FOUND, recipe_on("cuda:1"), tmp_path)
    assert not list(tmp_path.iterdir()), "there is one GPU"
    remember(rows[:0], FOUND, recipe_on("cuda"), tmp_path)
    assert not list(tmp_path.iterdir())
    remember(rows, FOUND, recipe_on("cuda"), tmp_path)
    assert read("NVIDIA H200", tmp_path).speedups
    said, cache = [], tmp_path / "file"
    cache.write_text("")
    remember(rows, FOUND, recipe_on("cuda"), cache, SimpleNamespace(say=said.append))
    assert said[0].startswith(f"Cannot write {cache}: ")


def test_the_rate_of_the_full_set_predicts_the_next_run(tmp_path, tiny_config):
    config = tiny_config(train__device="cpu")
    decisions = [Decision(name, True, "") for name in ("pretokenised", "bf16")]
    recipe = SimpleNamespace(config=config, decisions=decisions, machine=MACHINE)
    full = row("+ bf16", "added", 1.1, 1.2, speedup="bf16", speedups=["pretokenised", "bf16"])
    remember([full], FOUND, recipe, tmp_path)
    (run,) = runs_here(MACHINE, "cpu", tmp_path)
    assert (run.by, run.tokens_per_s) == ("bench", 1000.0)
    past = past_run(config, decisions)
    found = predict_time(past, config, flops_per_token=1e6, peak=None, runs=[run])
    assert found.source == "1 measurement of bench for this shape here"


@pytest.fixture
def swept(tiny_config):
    """Return the points of a sweep of the tiny run, and their resolved configurations."""

    def make(what, **changes):
        requested = tiny_config(**{"batch__rows_per_device": "auto", "speedups": "auto"} | changes)
        resolved = resolve_here(requested)
        points = SWEEPS[what](requested, resolved)
        configs = {
            name: resolve(
                requested.with_values({**keys, "train.device": "cpu"}),
                machine=resolved.machine,
                dataset=resolved.dataset,
                world_size=1,
            )[0]
            for name, keys in points.items()
            if not isinstance(keys, str)
        }
        return points, configs

    return make


def test_batch_doubles_the_rows_of_the_same_step(swept):
    _, configs = swept("batch")
    batches = [(c.batch.rows_per_device, c.batch.accumulate) for c in configs.values()]
    assert batches == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert next(iter(configs)) == "1 row"
    assert {c.batch.tokens_per_step for c in configs.values()} == {128}
    _, configs = swept("batch", batch__tokens_per_step=16 * 12)
    assert [c.batch.rows_per_device for c in configs.values()] == [1, 2, 4, 12]


def test_seq_len_does_not_change_the_tokens_per_step_or_micro_batch(swept):
    _, configs = swept("seq_len", batch__rows_per_device=4)
    assert [c.data.seq_len for c in configs.values()] == [4, 8, 16, 32, 64]
    assert {c.batch.tokens_per_step for c in configs.values()} == {128}
    assert {c.batch.rows_per_device * c.data.seq_len for c in configs.values()} == {64}
    points, configs = swept("seq_len", batch__tokens_per_step=16 * 3, batch__rows_per_device=1)
    assert "48 tokens" not in configs
    assert "not a multiple" in points["32 tokens"]


def test_a_length_that_one_dataset_of_a_mix_is_too_short_for_is_a_row(
    swept, tiny_set, write_tiny, tmp_path
):
    short = write_tiny(tmp_path / "short", num_documents=1)
    length = Dataset.open(short).split("train").num_tokens // 3
    mix = {"data__path": None, "data__mix": {str(tiny_set): 1, str(short): 1}}
    batch = {"batch__tokens_per_step": 4 * length, "batch__rows_per_device": 1}
    points, configs = swept("seq_len", **mix, **batch, data__seq_len=length)
    assert f"{length} tokens" in configs
    reason = points[f"{4 * length} tokens"]
    assert reason.startswith("cannot run here, because: ")
    assert "short has" in reason


def test_precision_uses_the_resolved_device_and_changes_nothing_else(
    tiny_config, swept, monkeypatch
):
    """On a machine with a GPU, `auto` may still choose the CPU."""
    monkeypatch.setattr(hardware, "_multiplies_bf16", lambda: True)
    _, configs = swept("precision")
    assert list(configs) == ["fp32", "bf16", "bf16-products", "fp16"]
    assert [c.train.precision for c in configs.values()] == ["fp32", "bf16", "bf16", "fp16"]
    assert "onednn" in configs["fp32"].speedups
    others = [
        set(c.speedups) - {*precisions(), "onednn", "fused-attention"} for c in configs.values()
    ]
    assert all(other == others[0] for other in others)
    requested = tiny_config(train__device="auto", train__precision="auto", speedups="auto")
    gpu = replace(MACHINE, cpu_multiplies_bf16=True)
    resolved = replace(resolve_here(requested.with_values({"train.device": "cpu"})), machine=gpu)
    points = SWEEPS["precision"](requested, resolved)
    assert [name for name, keys in points.items() if not isinstance(keys, str)] == list(configs)


def test_accumulation_grows_the_step_and_prefetch_goes_to_eight(swept):
    _, configs = swept("accumulation", batch__rows_per_device=2)
    assert list(configs)[:2] == ["1 micro-batch", "2 micro-batches"]
    assert [c.batch.accumulate for c in configs.values()] == [1, 2, 4, 8]
    assert [c.batch.tokens_per_step for c in configs.values()] == [32, 64, 128, 256]
    _, configs = swept("prefetch")
    assert ["prefetch" in c.speedups for c in configs.values()] == [False, True, True, True, True]
    assert [c.data.prefetch for c in configs.values()][1:] == [1, 2, 4, 8]


def test_a_sweep_with_nothing_to_measure_is_rejected(tiny_config, monkeypatch, tmp_path):
    monkeypatch.setitem(SWEEPS, "batch", lambda *_: {"1 rows": "no room."})
    with pytest.raises(ConfigError, match="nothing to measure"):
        run_bench(tiny_config(), sweep="batch", out=tmp_path / "bench")
    assert get_args(Sweep) == tuple(SWEEPS)
