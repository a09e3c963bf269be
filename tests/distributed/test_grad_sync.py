"""Copies reduce gradients once per step, shards in each micro-batch, with the same result."""

from types import SimpleNamespace

import pytest
import torch

from flatout.assembly.run import Run

pytestmark = pytest.mark.slow


def test_one_process_reduces_nothing():
    model = torch.nn.Linear(1, 1, bias=False)
    for is_last in (False, True):
        with Run.grad_sync(SimpleNamespace(model=model), is_last):
            model(torch.ones(1, 1)).backward()
    assert model.weight.grad.item() == 2


@pytest.mark.parametrize(("shard", "times"), [(1, 3), (2, 1)], ids=["ddp", "fully_shard"])
def test_the_weights_are_equal_with_fewer_reductions(launch, shard, times):
    report = launch("grad_sync_proof.py", 2, shard)
    always, found = report["always"], report["grad_sync"]
    for actual, expected in zip(found["weights"], always["weights"], strict=True):
        assert actual == [pytest.approx(row, rel=1e-5, abs=1e-7) for row in expected]
    assert found["exchanges"] > 0
    assert always["exchanges"] == times * found["exchanges"]
