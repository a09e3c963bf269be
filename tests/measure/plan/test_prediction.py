"""Predictions state their source, and rates come from earlier runs of the same shape."""

from dataclasses import replace

import pytest

from flatout.assembly.choices import Decision
from flatout.assembly.measured import past_run
from flatout.assembly.memory import estimate, workload_of
from flatout.hardware.machine import ASSUMED_MFU, GIB
from flatout.hardware.roofline import Peak
from flatout.measure.plan import prediction
from flatout.measure.plan.prediction import (
    COMPILED_MFU,
    CPU_OVERHEAD,
    EAGER_MFU,
    STARTING_S,
    assumed_rate,
    predict_memory,
    predict_time,
)

FLOPS, PEAK = 1e6, Peak(1.0, "a data sheet")


@pytest.fixture
def memory(planned, monkeypatch):
    """Return the predicted memory of `planned`, with other fields of the estimate."""
    found = estimate(workload_of(planned.config), 4, 2)

    def predict(config=planned.config, decisions=planned.decisions, **fields):
        monkeypatch.setattr(prediction, "estimate", lambda *_: replace(found, **fields))
        this = past_run(config, decisions)
        return predict_memory(this, workload_of(config), context=GIB)[0]

    return predict


@pytest.fixture
def time(planned):
    def predict(*runs, peak=PEAK, decisions=planned.decisions, **more):
        this = past_run(planned.config, decisions)
        return predict_time(
            this, planned.config, flops_per_token=FLOPS, peak=peak, runs=runs, **more
        )

    return predict


def test_a_process_has_an_assumed_overhead(memory):
    found = memory(largest=0)
    assert found.total == found.estimate.total + GIB + CPU_OVERHEAD
    assert found.source == "traced in eager mode"
    assert found.error == 0.1


def test_the_heap_of_a_cpu_keeps_holes_of_the_largest_tensor(memory, planned):
    """Measured with a vocabulary of 32,768: up to 1.7 GiB beyond all tensors."""
    found, on_gpu = memory(largest=GIB), planned.config.with_values({"train.device": "cuda"})
    assert found.total - memory(largest=0).total == found.reserved - found.estimate.total == 2 * GIB
    assert found.error > 0.5
    assert memory(on_gpu, largest=GIB).total == memory(on_gpu).total


def test_micro_batches_of_many_shapes_keep_twice_their_memory(memory, planned):
    config = planned.config.with_values({"batch.by_tokens": True})
    found, usual = memory(config, largest=0), memory(largest=0)
    assert found.reserved == 2 * usual.reserved == 2 * found.estimate.total
    assert found.error == 0.5
    on_gpu = {"train.device": "cuda"}
    assert (
        memory(config.with_values(on_gpu)).total == memory(planned.config.with_values(on_gpu)).total
    )


def test_a_compiled_model_may_need_much_less_on_every_device(memory, planned):
    compiled = [*planned.decisions, Decision("compile", True, "")]
    for device in ("cpu", "cuda"):
        config = planned.config.with_values({"train.device": device})
        found = memory(config=config, decisions=compiled)
        assert found.error is None
        assert "usually needs less" in found.source


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


def test_the_time_has_the_evaluations_and_what_an_earlier_run_needed_besides(time, planned, past):
    assert time(past(tokens_per_s=100.0)).wall_s == pytest.approx(100 * 128 / 100)
    beside = past(tokens_per_s=100.0, beside_s=6.0)
    scored = planned.dataset.split("val").num_tokens / 300
    assert time(beside, dataset=planned.dataset).wall_s == pytest.approx(128 + scored + 6)
    for rows, beside_s in ((4, 2.0), (8, 6.0)):  # another micro-batch is other code
        earlier = past(tokens_per_s=100.0, rows_per_device=rows, beside_s=6.0, cached_s=4.0)
        assert time(earlier).wall_s == pytest.approx(128 + beside_s)


STEP_TOKENS = 128
"""Tokens of one step of the tiny model."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_alone_computes_while_it_starts_operations(planned, past, memory, device):
    config = planned.config.with_values({"train.device": device})
    on_cpu = device == "cpu"
    share = ASSUMED_MFU if on_cpu else EAGER_MFU
    starting_s, of_peak = 1000 * STARTING_S, f"an assumed {share:.0%} of the peak"
    needs = memory(operations=1000, in_optimizer=0, optimizer_flops=0).estimate
    rate, source = assumed_rate(past(), config, STEP_TOKENS / share, FLOPS, needs)
    assert rate == pytest.approx(STEP_TOKENS / (1 + starting_s * on_cpu))
    started = f"{of_peak}, and an assumed 15 us to start each of 1,000 operations per step"
    assert source == (started if on_cpu else of_peak)
    bound, source = assumed_rate(past(), config, 1e15, FLOPS, needs)
    assert bound == pytest.approx(STEP_TOKENS / starting_s)
    assert ("of the peak" in source) == on_cpu
    if not on_cpu:
        assert assumed_rate(past(), config, 1.0, FLOPS)[0] == pytest.approx(COMPILED_MFU)


def test_small_micro_batches_are_slower_also_beside_runs_of_others(planned, past, memory):
    """A step starts operations, and its optimizer multiplies, however few its tokens are."""
    needs = memory()
    heavy = memory(optimizer_flops=10**10)

    def rates(*runs, memory=needs):
        found = []
        for rows in (1, 4, 64):
            batch = {"rows_per_device": rows, "accumulate": 2, "tokens_per_step": 32 * rows}
            config = planned.config.model_copy(
                update={"batch": planned.config.batch.model_copy(update=batch)}
            )
            this = past_run(config, planned.decisions)
            options = {"flops_per_token": FLOPS, "peak": PEAK, "memory": memory, "runs": runs}
            found.append(predict_time(this, config, **options).tokens_per_s)
        return [rate / found[-1] for rate in found]

    alone = rates()
    assert alone[0] < alone[1] < 1
    assert rates(memory=heavy)[0] < alone[0]
    for fields in ({}, {"digest": "another", "flops_per_token": FLOPS}):
        assert rates(past(tokens_per_s=100.0, **fields)) == pytest.approx(alone)


def test_only_an_eager_model_starts_its_operations_one_by_one(time, memory, planned):
    eager = time(memory=memory())
    assert "to start each of" in eager.source
    assert eager.tokens_per_s < time().tokens_per_s
    compiled = [*planned.decisions, Decision("compile", True, "")]
    found = time(memory=memory(decisions=compiled), decisions=compiled)
    assert found.source == "an assumed 30% of the peak"
