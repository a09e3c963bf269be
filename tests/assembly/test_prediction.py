"""Predictions state their source, and rates come from earlier runs of the same shape."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest

from flatout.assembly import measured
from flatout.assembly.choices import Decision, Gain
from flatout.assembly.measured import (
    FORMAT_VERSION,
    MINUTES,
    advice,
    gains_here,
    hardware_name,
    keep,
    past_run,
    read,
    runs_here,
    speedups_on,
)
from flatout.assembly.memory import estimate, workload_of
from flatout.assembly.prediction import (
    COMPILED_MFU,
    CPU_OVERHEAD,
    EAGER_MFU,
    STARTING_S,
    assumed_rate,
    predict_memory,
    predict_time,
)
from flatout.assembly.resolve import tokens_to_score
from flatout.hardware.machine import ASSUMED_MFU, GIB, Gpu, Machine
from flatout.hardware.roofline import Peak

FLOPS, PEAK = 1e6, Peak(1.0, "a data sheet")


@pytest.fixture
def run(build_run, tiny_config):
    return build_run(tiny_config(train__steps=100))


@pytest.fixture
def past(run):
    """Return a record of a run like `run`, with other fields laid over it."""

    def make(**fields):
        return past_run(run.config, run.decisions).model_copy(update=fields)

    return make


@pytest.fixture
def memory(run):
    """Return the predicted memory of `run`."""
    found = estimate(workload_of(run.config), 4, 2)

    def predict(config=run.config, decisions=run.decisions, largest=0):
        made = replace(found, largest=largest)
        this, on_gpu = past_run(config, decisions), config.train.device == "cuda"
        return predict_memory(this, made, on_gpu=on_gpu, context=GIB)

    return predict


@pytest.fixture
def time(run):
    def predict(*runs, peak=PEAK, decisions=run.decisions, **more):
        this = past_run(run.config, decisions)
        return predict_time(this, run.config, flops_per_token=FLOPS, peak=peak, runs=runs, **more)

    return predict


def test_a_process_has_an_assumed_overhead(memory):
    found = memory()
    assert found.total == found.estimate.total + GIB + CPU_OVERHEAD
    assert found.source == "traced in eager mode"
    assert found.error == 0.1
    assert found.least < found.estimate.total


def test_the_heap_of_a_cpu_keeps_holes_of_the_largest_tensor(memory, run):
    """Measured with a vocabulary of 32,768: up to 1.7 GiB beyond all tensors."""
    found, on_gpu = memory(largest=GIB), run.config.with_values({"train.device": "cuda"})
    assert found.total - memory().total == found.reserved - found.estimate.total == 2 * GIB
    assert found.error > 0.5
    assert memory(on_gpu, largest=GIB).total == memory(on_gpu).total


def test_a_compiled_model_may_need_much_less_on_every_device(memory, run):
    """A run that would fit must not be rejected."""
    compiled = [*run.decisions, Decision("compile", True, "")]
    for device in ("cpu", "cuda"):
        config = run.config.with_values({"train.device": device})
        found = memory(config=config, decisions=compiled)
        assert found.error is None
        assert "usually needs less" in found.source
        assert found.least < found.estimate.fixed + 0.31 * found.estimate.peak.total


def test_the_rate_comes_from_the_best_source_that_there_is(time, past):
    here = past(tokens_per_s=100.0)
    bench = past(by="bench", tokens_per_s=200.0)
    other = past(digest="another", tokens_per_s=0.5 * 1e12 / (2 * FLOPS), flops_per_token=2 * FLOPS)
    assert time(here, bench, other).tokens_per_s == 100.0
    assert time(bench, other).tokens_per_s == 200.0
    assert time(other).tokens_per_s == pytest.approx(0.5 * 1e12 / FLOPS)
    assert time().tokens_per_s == pytest.approx(0.3 * 1e12 / FLOPS)
    sources = [time(*runs).source for runs in ((here,), (bench,), (other,), ())]
    assert len(set(sources)) == 4
    without_peak = time(other, peak=None)
    assert without_peak.tokens_per_s == pytest.approx(0.5 * 1e12 / FLOPS)
    assert without_peak.mfu is None
    unknown = time(peak=None)
    assert (unknown.tokens_per_s, unknown.wall_s) == (None, None)
    assert unknown.source.startswith("unknown")


@pytest.mark.parametrize(
    "other", [{"flops_per_token": FLOPS / 8}, {"flops_per_token": 8 * FLOPS}, {"speedups": []}]
)
def test_a_run_that_differs_much_says_nothing_about_the_rate(time, past, other):
    facts = {"digest": "another", "tokens_per_s": 0.5 * 1e12 / FLOPS, "flops_per_token": FLOPS}
    assert time(past(**facts | other)).source == time().source


def test_of_two_runs_the_one_that_was_not_disturbed_decides(time, past):
    assert time(past(tokens_per_s=9.0), past(tokens_per_s=1.0)).tokens_per_s == 9.0
    busy, alone = past(tokens_per_s=9.0, is_busy=True), past(tokens_per_s=1.0)
    assert time(busy, alone).tokens_per_s == 1.0
    assert time(busy).source.endswith("while other processes used the cores")
    assert time(alone, past(tokens_per_s=9.0, rows_per_device=8)).tokens_per_s == 1.0


def test_the_time_has_the_evaluations_and_what_an_earlier_run_needed_besides(time, run, past):
    assert time(past(tokens_per_s=100.0)).wall_s == pytest.approx(100 * 128 / 100)
    beside = past(tokens_per_s=100.0, beside_s=6.0)
    scored = run.dataset.split("val").num_tokens / 300
    assert time(beside, dataset=run.dataset).wall_s == pytest.approx(128 + scored + 6)
    for rows, beside_s in ((4, 2.0), (8, 6.0)):  # another micro-batch is other code
        earlier = past(tokens_per_s=100.0, rows_per_device=rows, beside_s=6.0, cached_s=4.0)
        assert time(earlier).wall_s == pytest.approx(128 + beside_s)


def test_every_evaluation_is_counted(run):
    whole = run.dataset.split("val").num_tokens

    def scored(**values):
        keys = {f"train.{key}": value for key, value in values.items()}
        return tokens_to_score(run.config.with_values(keys), run.dataset)

    assert scored() == whole
    assert scored(eval_every=25) == 4 * whole
    assert scored(eval_every=25, eval_tokens=100) == 4 * 100 + whole
    assert tokens_to_score(run.config, None) == 0


def test_what_chose_the_micro_batch_is_no_speedup_of_the_run():
    on = [Decision(name, True, "") for name in ("prefetch", "micro-batch")]
    assert speedups_on([*on, Decision("bf16", False, "")]) == ["prefetch"]


STEP_TOKENS = 128
"""Tokens of one step of the tiny model."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_computes_while_it_starts_operations_and_a_cpu_does_not(run, device):
    config = run.config.with_values({"train.device": device})
    on_cpu = device == "cpu"
    share = ASSUMED_MFU if on_cpu else EAGER_MFU
    starting_s, of_peak = 1000 * STARTING_S, f"an assumed {share:.0%} of the peak"
    rate, source = assumed_rate(config, STEP_TOKENS / share, 1000)
    assert rate == pytest.approx(STEP_TOKENS / (1 + starting_s * on_cpu))
    started = f"{of_peak}, and an assumed 15 us to start each of 1,000 operations per step"
    assert source == (started if on_cpu else of_peak)
    bound, source = assumed_rate(config, 1e15, 1000)
    assert bound == pytest.approx(STEP_TOKENS / starting_s)
    assert ("of the peak" in source) == on_cpu
    if not on_cpu:
        assert assumed_rate(config, 1.0, 0)[0] == COMPILED_MFU


def test_only_an_eager_model_starts_its_operations_one_by_one(time, memory, run):
    eager = time(memory=memory())
    assert "to start each of" in eager.source
    assert eager.tokens_per_s < time().tokens_per_s
    compiled = [*run.decisions, Decision("compile", True, "")]
    found = time(memory=memory(decisions=compiled), decisions=compiled)
    assert found.source == "an assumed 30% of the peak"


H200, CPU = "NVIDIA H200", "AMD EPYC 7B13, 2 cores"
GPUS = tuple(Gpu(name, 141.0, (9, 0), "1") for name in (H200, "NVIDIA L4"))
MACHINE = Machine("AMD EPYC 7B13", 2, 8.0, GPUS, "3.11")
GAIN = Gain(
    gain=1.125,
    low=1.05,
    high=1.2,
    where="in the full set",
    recipe="gpt2-124m",
    date="2026-11-22T08:00:00",
    commit="abc1234",
    torch="2.9.0",
    flops_per_token=1e6,
)


def test_a_device_has_its_hardware_name():
    devices = ("cpu", "cuda", "cuda:0", "cuda:1", "cuda:2")
    names = [hardware_name(MACHINE, device) for device in devices]
    assert names == [CPU, H200, H200, "NVIDIA L4", None]


def test_runs_and_gains_are_kept_per_hardware(tmp_path, past):
    keep(CPU, tmp_path, run=past())
    keep(CPU, tmp_path, {"bf16": GAIN, "compile": GAIN})
    keep(CPU, tmp_path, run=past(kind="another"))
    keep(CPU, tmp_path, {"bf16": GAIN.model_copy(update={"gain": 1.5, "flops_per_token": 2e6})})
    keep(H200, tmp_path, run=past())
    assert [run.kind for run in runs_here(MACHINE, "cpu", tmp_path)] == ["transformer", "another"]
    assert list(runs_here(MACHINE, "cuda", tmp_path)) == [past()]
    found = read(CPU, tmp_path).speedups
    gains = {name: gain.gain for name, gain in found.items()}
    assert gains == {"compile@1e+06": 1.125, "bf16@2e+06": 1.5}
    assert read("NVIDIA H200 NVL", tmp_path).speedups is None


def test_only_the_latest_runs_are_kept(tmp_path, monkeypatch, past):
    monkeypatch.setattr(measured, "MOST_RUNS", 3)
    for number in range(5):
        keep(CPU, tmp_path, run=past(rows_per_device=number))
    kept = runs_here(MACHINE, "cpu", tmp_path)
    assert [run.rows_per_device for run in kept] == [2, 3, 4]


def test_an_unreadable_file_counts_as_absent(tmp_path, past):
    later = f'{{"hardware": "{H200}", "format_version": {FORMAT_VERSION + 1}}}'
    for text in ("", "[]", "{}", '{"hardware": 1}', '{"hardware": "another"}', later):
        keep(H200, tmp_path, {"bf16": GAIN}).write_text(text)
        assert read(H200, tmp_path).speedups is None
        assert not runs_here(MACHINE, "cuda", tmp_path)
        assert gains_here(MACHINE, "cuda", tmp_path) == {}
    keep("A GPU", tmp_path, run=past())
    assert not read("A-GPU", tmp_path).runs, "two names share a file"


def test_the_digest_covers_what_decides_the_arithmetic(run):
    def digest(decisions=run.decisions, world_size=1, **values):
        config = run.config.with_values({k.replace("__", "."): v for k, v in values.items()})
        return past_run(config, decisions, world_size).digest

    fewer = [decision for decision in run.decisions if decision.name != "prefetch"]
    values = [{"lora__rank": 4}, {"lora__rank": 8}, {"optim__kind": "muon"}, {"data__seq_len": 8}]
    changed = [{"decisions": fewer}, {"world_size": 2}, *values]
    assert len({digest(), *(digest(**each) for each in changed)}) == 7
    same = (digest(decisions=run.decisions[::-1]), digest(batch__rows_per_device=8))
    assert set(same) == {digest()}


def test_the_hint_is_given_once_per_gpu(tmp_path, past):
    keep(H200, tmp_path, run=past())  # a run alone has measured no speedup
    line = advice(H200, "gpt2-124m", tmp_path)
    assert line.startswith(f"No speedup has been measured on this GPU ({H200}). ")
    assert f"`flatout bench gpt2-124m --minutes {MINUTES}`" in line
    assert "\n" not in line
    assert advice(H200, "gpt2-124m", tmp_path) is None
    assert advice("NVIDIA L4", "RECIPE", tmp_path) is not None
    keep("NVIDIA A10", tmp_path, {"bf16": GAIN})
    assert advice("NVIDIA A10", "gpt2-124m", tmp_path) is None
    (tmp_path / "file").write_text("")
    assert advice(H200, "x", tmp_path / "file") == advice(H200, "x", tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        keep(H200, tmp_path / "file", {})


def test_only_gains_with_this_torch_and_hardware_count(tmp_path):
    here = GAIN.model_copy(update={"torch": version("torch").partition("+")[0] + "+cu130"})
    keep(CPU, tmp_path, {"bf16": here, "compile": GAIN})
    assert gains_here(MACHINE, "cpu", tmp_path) == {"bf16": here}
    assert gains_here(replace(MACHINE, cores=4), "cpu", tmp_path) == {}
    assert gains_here(MACHINE, "cuda", tmp_path) == {}
    assert gains_here(MACHINE, "cpu", None) == {}


def test_a_gain_is_described_in_one_line():
    where = "in the full set of gpt2-124m, 2026-11-22"
    assert GAIN.describe() == f"x1.12 (1.05 to 1.20), {where}, commit abc1234"
    unsure = GAIN.model_copy(update={"low": None, "commit": None})
    assert unsure.describe() == f"x1.12 (too few repeats to be sure), {where}"
    for low, high, is_faster, is_slower in (
        (1.01, 1.2, True, False),
        (0.8, 0.99, False, True),
        (0.9, 1.1, False, False),
        (None, None, False, False),
    ):
        gain = GAIN.model_copy(update={"low": low, "high": high})
        assert (gain.is_faster, gain.is_slower) == (is_faster, is_slower)
