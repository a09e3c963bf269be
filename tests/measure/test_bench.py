"""The ablation, the sweeps and what they keep, with imaginary trials, and once with real ones."""

import re
import sys
from types import SimpleNamespace

import pytest
from made_up import OUT_OF_MEMORY, MadeUp

from flatout.assembly.choices import Decision
from flatout.assembly.measured import past_run, read, runs_here
from flatout.assembly.resolve import flops_per_token
from flatout.config.schema import load_config
from flatout.display import terminal_text
from flatout.errors import ConfigError, Interrupted, RunFailed, Terminated
from flatout.hardware.machine import Gpu, Machine
from flatout.measure import bench as benching
from flatout.measure import output
from flatout.measure.bench import remember, results_dir, run_bench, values_of
from flatout.measure.evidence import Failure
from flatout.measure.intervals import Figure
from flatout.measure.plan.prediction import predict_time
from flatout.measure.race import Row
from flatout.measure.results import Bench
from flatout.measure.trial import Result

pytestmark = pytest.mark.slow

SLOW = {"pretokenised": 1.3, "micro-batch": 2.0, "onednn": 1.2}
"""The gains of speedups on the made-up machine; all others gain nothing."""


@pytest.fixture
def bench(tiny_config, tmp_path, monkeypatch):
    """Return a function that benches a tiny recipe on a made-up machine: the result, its rows, and
    the names and rounds of its trials.
    """

    def run(machine, **limits):
        trials = []
        machine.install(monkeypatch)
        race = benching.race_of

        def noted(*words, **options):
            made = race(*words, **options)
            plain = made.run
            made.run = lambda setting, number, seed: (
                plain(setting, number, seed),
                trials.append((made.name(setting), number)),
            )[0]
            return made

        monkeypatch.setattr(benching, "race_of", noted)
        config = tiny_config(
            **{"batch__rows_per_device": "auto", "speedups": "auto"} | limits.pop("changes", {})
        )
        found = run_bench(config, out=tmp_path / "bench", **limits)
        monkeypatch.setattr(benching, "race_of", race)
        assert Bench.model_validate_json((tmp_path / "bench/bench.json").read_text()) == found
        return found, {row.name: row for row in found.rows}, trials

    return run


def test_every_other_round_runs_backwards_and_a_round_shares_a_seed(bench):
    made_up = MadeUp()
    _, rows, trials = bench(made_up, repeats=3)
    orders = [[name for name, number in trials if number == n] for n in (1, 2, 3)]
    usual = [[name for name in each if rows[name].kind != "add-one"] for each in orders]
    assert usual[0] == usual[1][::-1] == usual[2]
    assert len(set(orders[0])) == len(orders[0]), "equal sets are measured once"
    seeds = [config.train.seed for config, _ in made_up.trials]
    first = seeds[0]
    assert seeds == [first + n for n in (0, 1, 2) for _ in orders[0]]


def test_gains_are_found_and_written(bench, tmp_path):
    found, rows, _ = bench(MadeUp(speedups=SLOW))
    for name, gain in SLOW.items():
        assert rows[f"+ {name}"].gain.median == pytest.approx(gain, rel=0.05)
        assert rows[f"- {name}"].gain.low > 1, "what it is worth in the full set"
    last, below = [row for row in found.rows if row.kind == "added"][:-3:-1]
    assert rows[f"- {last.speedup}"].tokens_per_s == below.tokens_per_s
    assert rows["+ prefetch"].gain.gain().startswith("none (")
    assert rows["+ prefetch"].within_tolerance is True
    assert found.total.median == pytest.approx(1.3 * 2.0 * 1.2, rel=0.05)
    assert found.total_speedup == found.total.median
    assert found.repeats == 5
    files = {path.name for path in (tmp_path / "bench").iterdir()}
    assert files == {"bench.json", "table.md"}
    assert "| + micro-batch |" in (tmp_path / "bench/table.md").read_text()


@pytest.mark.quick_cases("80")
@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_a_terminal_also_after_an_interruption(bench, width):
    for machine in (MadeUp(speedups=SLOW, losses={"onednn": 0.1}), MadeUp(stops_after=4)):
        found, _, _ = bench(machine)
        text = terminal_text(found.display(), width)
        assert max(map(len, text.splitlines())) <= width
        assert text.count("Not measured") == found.complete
        assert found.complete or re.search(
            r"It was interrupted before .*,\s+and\s+\d+\s+more\s+had\s+a\s+turn", text, re.DOTALL
        )
        assert "tokens/s  gain" in text


def test_the_time_limit_is_kept_and_the_important_comes_first(bench):
    made_up = MadeUp(overhead_s=20.0)
    found, _, _ = bench(made_up, minutes=3)
    assert made_up.now <= 180
    assert any(row.status == "not-measured" and "time was up" in row.reason for row in found.rows)
    assert any(" Add --minutes." in note for note in found.notes)
    made_up = MadeUp(overhead_s=4.0)
    found, _, _ = bench(made_up, minutes=6)
    assert made_up.now <= 360
    assert min(row.repeats for row in found.rows if row.kind not in {"absent", "add-one"}) >= 2
    shortest, _, trials = bench(MadeUp(overhead_s=20.0), minutes=0.8)
    full = [row for row in shortest.rows if row.kind == "added"][-1].name
    assert [name for name, _ in trials[:2]] == ["baseline", full]
    assert "too few times to compare" in shortest.summary()
    sweep, _, _ = bench(MadeUp(overhead_s=20.0), minutes=1, sweep="data.prefetch=1,2,4,8")
    assert any("--minutes" in note for note in sweep.notes)
    assert not any("speedups=" in note for note in sweep.notes)


def test_a_failure_is_a_row(bench):
    gone = Result(failure=Failure(kind="error", message="It took too long."))
    made_up = MadeUp(overhead_s=4.0, fails={"compile": gone, "onednn": OUT_OF_MEMORY})
    found, rows, trials = bench(made_up, minutes=30)
    assert [number for name, number in trials if name == "+ compile"] == [1]
    assert rows["+ onednn"].status == "out-of-memory"
    assert sum(name == "+ onednn" for name, _ in trials) == 1
    assert rows["- onednn"].status == "ok"
    assert found.total is None
    assert "Out of memory: too many rows." in found.summary()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, Terminated(15), Interrupted("x.", fix="y.", signal_number=15)]
)
def test_an_interruption_keeps_the_trials(bench, error):
    found, _, trials = bench(MadeUp(stops_after=4, error=error))
    assert found.ended_by_signal == (2 if error is KeyboardInterrupt else 15)
    assert found.exit_code == 128 + found.ended_by_signal
    assert len(trials) == found.num_trials == 4
    assert found.summary().startswith("Interrupted.")
    assert next(row.name for row in found.rows if row.status == "ok") == "baseline"


def test_nothing_is_left_where_nothing_could_be_measured(bench, tmp_path):
    with pytest.raises(Interrupted, match="before any trial had a result") as stopped:
        bench(MadeUp(stops_after=0))
    assert stopped.value.exit_code == 130
    with pytest.raises(RunFailed, match=r"Nothing was measured: .* It fell over"):
        bench(MadeUp(fails={"all": Result(failed={"x": "It fell over."})}), repeats=2)
    assert not (tmp_path / "bench").exists()


def test_a_speedup_out_of_tolerance_is_shown(bench, tmp_path):
    _, rows, _ = bench(MadeUp(losses={"onednn": 0.1}), repeats=1)
    row = rows["+ onednn"]
    assert (row.tolerance, row.within_tolerance) == ("rounding", False)
    assert "OUT OF TOLERANCE" in (tmp_path / "bench/table.md").read_text()
    plain, _, _ = bench(MadeUp(), repeats=2, changes={"speedups": "none"})
    assert plain.total is None


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("batch.rows_per_device", (1, 2, 4, 8)),
        ("data.seq_len", (4, 8, 16, 32)),
        ("optim.kind", ("adamw", "muon")),
    ],
)
def test_a_sweep_is_measured_like_an_ablation(bench, tmp_path, key, values):
    made_up = MadeUp()
    found, _, _ = bench(made_up, sweep=f"{key}={','.join(map(str, values))}", repeats=2)
    assert (found.kind, found.total) == (key, None)
    assert [row.name for row in found.rows] == [f"{key}={value}" for value in values]
    assert {row.repeats for row in found.rows} == {2}
    assert "gain" not in (tmp_path / "bench/table.md").read_text().partition("\n\n-")[0]
    configs = [config for config, _ in made_up.trials]
    assert [config.value(key) for config in configs] == [*values, *values[::-1]]
    assert {config.batch.tokens_per_step for config in configs} == {128}


UNMEASURED = ("train.seed", "log.every", "train.eval_every", "checkpoint.every_steps")


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("batch", "--sweep batch names no values"),
        ("batch.rows_per_divice=1,2", "rows_per_device"),
        ("batch.rows_per_device=4", "names no values that trials measure and compare"),
        ("batch.rows_per_device=4,4", "names no values that trials measure and compare"),
        ("batch.rows_per_device=1,two", "batch.rows_per_device"),
        ("batch.rows_per_device=,", "names no values"),
        *((f"{key}=1,2", f"--sweep {key}=1,2 names no values") for key in UNMEASURED),
    ],
)
def test_a_sweep_that_is_not_possible_is_an_error(tiny_config, sweep, message):
    with pytest.raises(ConfigError) as caught:
        values_of(tiny_config(), sweep)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "dropout", [{"model__dropout": 0.1}, {"lora__rank": 4, "lora__dropout": 0.1}], ids=str
)
def test_losses_with_dropout_are_not_compared_step_by_step(tiny_config, dropout):
    assert benching.race_of(tiny_config(), 1.0).draws is None
    assert "dropout=0.1 draws" in benching.race_of(tiny_config(**dropout), 1.0).draws


@pytest.mark.thorough
def test_real_trials_catch_a_loss_that_is_a_little_wrong(tiny_config, tmp_path, monkeypatch):
    (tmp_path / "alittleoff.py").write_text(
        "from flatout.ops.cross_entropy import fused\n"
        "from flatout.assembly.speedup import Speedup, Tolerance\n"
        "def off(*arguments, **named):\n"
        "    loss_sum, num_valid = fused(*arguments, **named)\n"
        "    return loss_sum * (1 + 1e-5), num_valid\n"
        "def apply(parts):\n"
        "    parts.cross_entropy = off\n"
        "SPEEDUP = Speedup('alittleoff:SPEEDUP', apply, '', Tolerance.exact())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(benching, "SECONDS", 0.02)
    monkeypatch.setattr(benching, "LEAST_SECONDS", 0.02)
    report = run_bench(
        tiny_config(speedups="alittleoff:SPEEDUP"), repeats=1, out=tmp_path / "bench"
    )
    rows = {row.name: row for row in report.rows}
    assert {row.status for row in report.rows} == {"ok"}, [row.reason for row in report.rows]
    assert rows["+ alittleoff:SPEEDUP"].within_tolerance is False
    assert rows["+ alittleoff:SPEEDUP"].loss_difference == pytest.approx(1e-5, rel=0.2)
    assert (rows["baseline"].rows_per_device, rows["baseline"].accumulate) == (4, 2)
    assert report.environment["device"] == "cpu"
    assert not (tmp_path / "runs").exists()
    sys.modules.pop("alittleoff")


def test_results_get_their_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("shakespeare-char")
    first = results_dir(config, None)
    assert first.parts[0] == "bench"
    assert first.name.startswith("shakespeare-char-")
    for expected in (first, first.with_name(f"{first.name}-2"), first.with_name(f"{first.name}-3")):
        assert results_dir(config, None) == expected
        expected.mkdir(parents=True)
    (tmp_path / "thesis.txt").touch()
    for out in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(ConfigError, match="did not write it"):
            results_dir(config, out)
    (tmp_path / "bench.json").touch()
    assert results_dir(config, tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="Cannot write"):
        output.claim(tmp_path / "thesis.txt" / "x")


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
        row("- a", "leave-one-out", 1.0, 1.2, speedup="prefetch"),
        row("+ b", "added", 2.0, 2.2, speedup="tf32", within_tolerance=False),
        row("- c", "change", 0.5, 0.5, speedup="compile", leaves_out=True),
        Row(name="+ d", kind="added", speedup="fp16", gain=Figure(median=3.0)),
        Row(name="e", kind="absent", speedup="fp8"),
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
    assert (found["prefetch"].recipe, found["prefetch"].flops_per_token) == ("run", flops)


def test_gains_are_stored_for_the_hardware_that_measured(tmp_path):
    rows = [row("- a", "leave-one-out", 2.0, 2.2, speedup="prefetch")]
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
    recipe = SimpleNamespace(config=config, decisions=decisions, machine=MACHINE, dataset=None)
    full = row("+ bf16", "added", 1.1, 1.2, speedup="bf16", speedups=["pretokenised", "bf16"])
    remember([full], FOUND, recipe, tmp_path)
    (run,) = runs_here(MACHINE, "cpu", tmp_path)
    assert (run.by, run.tokens_per_s) == ("bench", 1000.0)
    past = past_run(config, decisions)
    found = predict_time(past, config, flops_per_token=1e6, peak=None, runs=[run])
    assert found.source == "1 bench run of this shape here"
