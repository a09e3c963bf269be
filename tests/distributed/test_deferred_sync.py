"""Gradients are reduced once per step, with the same result."""

from __future__ import annotations

import pytest
import torch

from flatout.assembly.selection import speedup_named
from flatout.hardware.machine import Machine
from flatout.speedups.deferred_sync import sync_with_the_last

pytestmark = pytest.mark.slow

MACHINE = Machine("a CPU", 2, 8.0, (), "3.11")


def reason(tiny_config, **changes):
    return speedup_named("deferred-sync").reason_against(MACHINE, tiny_config(**changes))


def test_it_needs_several_processes_and_micro_batches(tiny_config):
    assert "this run has one" in reason(tiny_config)
    assert "one micro-batch" in reason(tiny_config, parallel__replicate=2, batch__accumulate=1)
    assert reason(tiny_config, parallel__replicate=2, batch__accumulate=4) is None
    assert reason(tiny_config, parallel__replicate=2) is None, (
        "how many micro-batches is not settled yet"
    )


def test_sharded_weights_keep_sharded_gradients_unless_it_is_named(tiny_config):
    sharded = {"parallel__replicate": 1, "parallel__shard": 2, "batch__accumulate": 4}
    assert "unsharded gradients" in reason(tiny_config, **sharded)
    assert reason(tiny_config, **sharded, speedups="auto,+deferred-sync") is None


def test_one_process_reduces_nothing():
    model = torch.nn.Linear(1, 1, bias=False)
    for is_last in (False, True):
        with sync_with_the_last(model, is_last):
            model(torch.ones(1, 1)).backward()
    assert model.weight.grad.item() == 2


@pytest.mark.parametrize("shard", [1, 2], ids=["ddp", "fully_shard"])
def test_the_weights_are_equal_with_fewer_reductions(launch, shard):
    report = launch("deferred.py", 2, shard)
    always, last = report["sync_every_micro_batch"], report["sync_with_the_last"]
    for actual, expected in zip(last["weights"], always["weights"], strict=True):
        assert actual == [pytest.approx(row, rel=1e-5, abs=1e-7) for row in expected]
    assert last["exchanges"] > 0
    assert always["exchanges"] == 3 * last["exchanges"]
