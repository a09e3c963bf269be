"""Predictions state their source, and earlier runs of the same shape correct them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.assembly.memory import estimate
from flatout.assembly.parts import Decision
from flatout.assembly.past_runs import PastRun, shape_of
from flatout.assembly.prediction import (
    CPU_OVERHEAD,
    GIB,
    predict_memory,
    predict_time,
    speedups_on,
    tokens_to_score,
)
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble
from flatout.roof import Peak

FLOPS, PEAK = 1e6, Peak(1.0, "a data sheet")


@pytest.fixture
def run(build_run, tiny_config):
    return build_run(tiny_config(train__steps=100))


@pytest.fixture
def past(run):
    """Return a record of a run like `run`, with other fields laid over it."""

    def make(**fields):
        plain = {
            "by": "train",
            "recipe": "tiny",
            "date": "",
            "torch": "",
            "shape": shape_of(run.config),
            "kind": "transformer",
            "speedups": speedups_on(run.decisions),
            "rows_per_device": 4,
            "accumulate": 2,
            "world_size": 1,
            "is_compiled": False,
        }
        return PastRun(**plain | fields)

    return make


@pytest.fixture
def memory(run):
    """Return the predicted memory of `run`, given earlier runs."""
    found = estimate(workload_of(run.config, assemble(run.decisions)), 4, 2)

    def predict(*runs, config=run.config, decisions=run.decisions, largest=0):
        made = replace(found, largest=largest)
        return predict_memory(config, decisions, made, runs=runs, context=GIB)

    return predict


@pytest.fixture
def time(run):
    def predict(*runs, peak=PEAK, **more):
        return predict_time(
            run.config,
            run.decisions,
            flops_per_token=FLOPS,
            peak=peak,
            runs=runs,
            **more,
        )

    return predict


def test_without_earlier_runs_a_process_has_an_assumed_overhead(memory):
    found = memory()
    assert found.total == found.estimate.total + GIB + CPU_OVERHEAD
    assert found.source == "traced in eager mode"
    assert found.error == 0.1
    assert found.least < found.estimate.total


def test_the_heap_keeps_holes_of_the_largest_tensor(memory, past, run):
    """Measured with a vocabulary of 32,768: up to 1.7 GiB beyond all tensors."""
    assert "kept-memory" in speedups_on(run.decisions)
    found, without = memory(largest=GIB), [d for d in run.decisions if d.name != "kept-memory"]
    assert found.total - memory().total == found.reserved - found.allocated == 2 * GIB
    assert found.error > 0.5
    assert memory(largest=GIB, decisions=without).total == memory().total
    part = replace(found.estimate, largest=GIB // 4)
    held = (part.total + 2 * part.largest) / GIB
    earlier = past(estimate=part, context_gib=0.5, peak_gib=0.5 + held + 0.25)
    overhead = memory(earlier, largest=GIB).context - GIB
    assert overhead == pytest.approx(0.25 * GIB), "the holes are not counted twice"


def test_an_earlier_run_of_the_shape_gives_the_overhead(memory, past):
    part = memory().estimate
    size, sized = part.total / GIB, {"estimate": part, "context_gib": 0.5}
    same = past(**sized, peak_gib=0.5 + size + 0.25)
    other = past(**sized, peak_gib=0.5 + size + 0.75, shape="another")
    found = memory(other, same)
    assert found.context == pytest.approx(1.25 * GIB)
    assert found.source == "traced, corrected by 1 earlier run of this recipe's shape here"
    found = memory(other)
    assert found.context == pytest.approx(1.75 * GIB)
    assert found.source == "traced, corrected by 1 earlier run of other shapes here"


def test_the_error_is_the_spread_of_the_earlier_runs(memory, past):
    sized = {"estimate": memory().estimate, "context_gib": 0.5}
    runs = [past(**sized, peak_gib=gib) for gib in (1.0, 1.0, 0.8)]
    assert memory(*runs).error == pytest.approx(0.25)


def test_a_compiled_model_on_a_gpu_is_corrected_by_what_one_needed(memory, run, past):
    config = run.config.with_values({"train.device": "cuda"})
    compiled = [*run.decisions, Decision("compile", True, "")]
    before = memory(config=config, decisions=compiled)
    assert before.error is None
    assert "usually needs less" in before.source
    part = before.estimate
    fixed, variable = (part.fixed + part.gradients) / GIB, (part.total - part.fixed) / GIB
    halved = past(
        estimate=part,
        peak_gib=fixed + variable / 2,
        reserved_gib=1.2 * (fixed + variable / 2),
        is_compiled=True,
        shape="another",
    )
    found = memory(halved, config=config, decisions=compiled)
    assert found.allocated / GIB == pytest.approx(fixed + variable / 2, rel=1e-3)
    assert found.reserved / found.allocated == pytest.approx(1.2)
    assert found.peak_gib == found.allocated / GIB


def test_a_compiled_model_on_a_cpu_may_need_much_less_whatever_was_measured(memory, run, past):
    """Its process is measured, not its tensors; a run that would fit must not be refused."""
    compiled = [*run.decisions, Decision("compile", True, "")]
    part = memory().estimate
    measured = past(
        estimate=part, context_gib=0.5, peak_gib=0.5 + part.total / GIB, is_compiled=True
    )
    for runs in ((), (measured,)):
        found = memory(*runs, decisions=compiled)
        assert found.least < found.estimate.fixed + 0.31 * found.estimate.peak.total


def test_the_rate_comes_from_the_best_source_that_there_is(time, past):
    here = past(tokens_per_s=100.0, mfu=0.2)
    bench = past(by="bench", tokens_per_s=200.0)
    other = past(shape="another", tokens_per_s=0.5 * 1e12 / (2 * FLOPS), mfu=0.5)
    assert time(here, bench, other).tokens_per_s == 100.0
    assert time(bench, other).tokens_per_s == 200.0
    assert time(other).tokens_per_s == pytest.approx(0.5 * 1e12 / FLOPS)
    assert time().tokens_per_s == pytest.approx(0.3 * 1e12 / FLOPS)
    sources = [time(*runs).source for runs in ((here,), (bench,), (other,), ())]
    assert len(set(sources)) == 4
    unknown = time(peak=None)
    assert (unknown.tokens_per_s, unknown.wall_s) == (None, None)
    assert unknown.source.startswith("unknown")


@pytest.mark.parametrize("ratio", [1 / 8, 8])
def test_a_much_smaller_or_larger_model_says_nothing_about_the_rate(time, past, ratio):
    other = past(shape="another", tokens_per_s=0.5 * 1e12 / (ratio * FLOPS), mfu=0.5)
    assert time(other).source == time().source


def test_the_same_micro_batch_is_preferred(time, past):
    assert time(past(tokens_per_s=1.0), past(tokens_per_s=9.0, rows_per_device=8)).tokens_per_s == 1


def test_of_two_runs_the_one_that_was_not_disturbed_decides(time, past):
    assert time(past(tokens_per_s=9.0), past(tokens_per_s=1.0)).tokens_per_s == 9.0
    busy, alone = past(tokens_per_s=9.0, is_busy=True), past(tokens_per_s=1.0)
    assert time(busy, alone).tokens_per_s == 1.0
    assert time(busy).source.endswith("while other processes used the cores")


def test_other_speedups_say_nothing_about_the_rate(time, past):
    assert time(past(tokens_per_s=1.0, speedups=[])).source.startswith("an assumed")


def test_the_time_has_the_evaluations_and_what_an_earlier_run_needed_besides(time, run, past):
    alone = time(past(tokens_per_s=100.0))
    assert alone.wall_s == pytest.approx(100 * 128 / 100)
    beside = past(tokens_per_s=100.0, wall_s=30.0, train_s=20.0, score_s=4.0)
    scored = run.dataset.split("val").num_tokens / 300
    whole = time(beside, dataset=run.dataset)
    assert whole.wall_s == pytest.approx(128 + scored + 6)
    resumed = time(beside, dataset=run.dataset, first_step=50)
    assert resumed.wall_s == pytest.approx(64 + scored + 6)


@pytest.mark.parametrize(("rows", "beside_s"), [(4, 2.0), (8, 6.0)])
def test_what_torch_keeps_on_disk_is_not_compiled_again(time, past, rows, beside_s):
    """Another micro-batch is other code."""
    seconds = {"wall_s": 30.0, "train_s": 20.0, "score_s": 4.0, "cached_s": 4.0}
    earlier = past(tokens_per_s=100.0, rows_per_device=rows, **seconds)
    assert time(earlier).wall_s == pytest.approx(128 + beside_s)


def test_every_evaluation_is_counted(run):
    whole = run.dataset.split("val").num_tokens

    def scored(**values):
        keys = {f"train.{key}": value for key, value in values.items()}
        return tokens_to_score(run.config.with_values(keys), run.dataset)

    assert scored() == whole
    assert scored(eval_every=25) == 4 * whole
    assert scored(eval_every=25, eval_tokens=100) == 4 * 100 + whole
    assert tokens_to_score(run.config, None) is None


def test_what_chose_the_micro_batch_is_no_speedup_of_the_run():
    on = [Decision(name, True, "") for name in ("prefetch", "micro-batch")]
    assert speedups_on([*on, Decision("bf16", False, "")]) == ["prefetch"]
