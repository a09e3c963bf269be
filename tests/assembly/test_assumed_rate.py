"""Without a measurement, small operations decide the rate of small models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.assembly.assumed_rate import STARTING_S, assumed_rate
from flatout.assembly.memory import operations_per_step
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble

STEP_TOKENS = 128
"""Tokens of one step of the tiny model."""


@pytest.fixture
def workload(build_run, tiny_config):
    run = build_run(tiny_config(batch__rows_per_device=4, batch__accumulate=2))
    assert run.config.batch.tokens_per_step == STEP_TOKENS
    return run.config, workload_of(run.config, assemble(run.decisions))


def test_the_operations_of_a_step_are_those_of_its_micro_batches_and_the_optimizer(workload):
    one, two, three, four = (operations_per_step(workload[1], 4, count) for count in (1, 2, 3, 4))
    assert four - three == three - two > 100
    blocks = workload[1].model_config.model_copy(update={"num_layers": 4})
    deeper = operations_per_step(replace(workload[1], model_config=blocks), 4)
    assert one < deeper < 4 * one


def test_a_cpu_starts_operations_before_it_computes_them(workload):
    config, found = workload
    starting_s = STARTING_S * operations_per_step(found, 4, 2)
    slow, source = assumed_rate(config, STEP_TOKENS / 0.3, found)
    assert slow == pytest.approx(STEP_TOKENS / (1 + starting_s))
    assert "30% of the peak, and an assumed 15 us to start each of" in source
    fast, _ = assumed_rate(config, 1e15, found)
    assert fast == pytest.approx(STEP_TOKENS / starting_s)


def test_a_gpu_starts_operations_while_it_computes(workload):
    config, found = workload
    on_gpu = config.with_values({"train.device": "cuda"})
    assert assumed_rate(on_gpu, STEP_TOKENS / 0.3, found) == (
        pytest.approx(STEP_TOKENS),
        "an assumed 30% of the peak",
    )
    bound, source = assumed_rate(on_gpu, 1e15, found)
    assert bound == pytest.approx(STEP_TOKENS / (STARTING_S * operations_per_step(found, 4, 2)))
    assert "of the peak" not in source


def test_a_compiled_model_and_one_that_cannot_be_traced_reach_the_assumed_share(workload):
    config, found = workload
    untraceable = replace(found, model_class=None)
    for without in (None, untraceable):
        assert assumed_rate(config, 1000.0, without) == (300.0, "an assumed 30% of the peak")
