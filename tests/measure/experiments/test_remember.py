"""The last gain of each speedup of an ablation is stored for the GPU or CPU that measured it."""

from __future__ import annotations

from types import SimpleNamespace

from flatout.assembly.prediction import past_run, predict_time, read, runs_here
from flatout.assembly.resolve import flops_per_token
from flatout.assembly.selection import Decision
from flatout.config.schema import load_config
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.experiments.bench import gains_of, remember

MACHINE = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")


def resolved(device):
    """A resolved recipe whose full set is in no report."""
    config = load_config(None, [f"train.device={device}"])
    decisions = [Decision("bf16", True, "")]
    return SimpleNamespace(config=config, decisions=decisions, machine=MACHINE)


def changed(report, name, **changes):
    """Return the report with changes to one line."""
    rows = [row.model_copy(update=changes) if row.name == name else row for row in report.rows]
    return report.model_copy(update={"rows": rows})


def test_the_gain_in_the_full_set_counts_most(sample_report):
    report = changed(sample_report, "+ prefetch", speedup="prefetch")
    below = gains_of(report)
    assert set(below) == {"pretokenised", "prefetch"}
    gain = below["pretokenised"]
    assert (gain.gain, gain.recipe, gain.commit, gain.torch) == (
        2.1,
        "shakespeare-char",
        "abc1234",
        "2.13.0",
    )
    assert below["prefetch"].where == "on the way up"
    within = gains_of(changed(report, "all but prefetch", speedup="prefetch"))
    assert within["prefetch"].where == "in the full set"
    broken = changed(report, "+ prefetch", within_tolerance=False)
    assert set(gains_of(broken)) == {"pretokenised"}


def test_it_is_stored_for_the_hardware_that_measured(sample_report, tmp_path):
    remember(sample_report, resolved("cuda:1"), tmp_path)
    assert not list(tmp_path.iterdir()), "there is one GPU"
    without_gains = sample_report.model_copy(update={"rows": sample_report.rows[:1]})
    remember(without_gains, resolved("cuda"), tmp_path)
    assert not list(tmp_path.iterdir())
    for device, hardware in (("cuda", "NVIDIA H200"), ("cpu", "a CPU, 2 cores")):
        remember(sample_report, resolved(device), tmp_path)
        (stored,) = read(hardware, tmp_path).speedups.items()
        flops = flops_per_token(resolved(device).config)
        assert (stored[0].partition("@")[0], stored[1].flops_per_token) == ("pretokenised", flops)
    said, cache = [], tmp_path / "file"
    cache.write_text("")
    remember(sample_report, resolved("cuda"), cache, SimpleNamespace(say=said.append))
    (line,) = said
    assert line.startswith(f"Cannot write {cache}: ")


def test_the_rate_of_the_full_set_predicts_the_next_run(sample_report, tmp_path, tiny_config):
    full = max(sample_report.rows, key=lambda row: len(row.speedups))
    decisions = [Decision(name, True, "") for name in full.speedups]
    config = tiny_config(train__device="cpu")
    recipe = SimpleNamespace(config=config, decisions=decisions, machine=MACHINE)
    remember(sample_report, recipe, tmp_path)
    (run,) = runs_here(MACHINE, "cpu", tmp_path)
    assert (run.by, run.tokens_per_s) == ("bench", full.tokens_per_s.median)
    past = past_run(config, decisions)
    found = predict_time(past, config, flops_per_token=1e6, peak=None, runs=[run])
    assert found.tokens_per_s == full.tokens_per_s.median
    assert found.source == "1 measurement of bench for this shape here"
