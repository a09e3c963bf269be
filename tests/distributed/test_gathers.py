"""Weights gathered in bfloat16 are rounded as in autocast, and stay fp32 in their shards."""

from __future__ import annotations

import pytest

from flatout.assembly.selection import speedup_named
from flatout.hardware.machine import Machine

pytestmark = pytest.mark.slow

MACHINE = Machine("a CPU", 2, 8.0, (), "3.11")
LAYOUTS = {"fully_shard": (2, 2), "hsdp": (4, 2)}


def reason(tiny_config, **changes):
    return speedup_named("bf16-gathers").reason_against(MACHINE, tiny_config(**changes))


def test_it_needs_sharded_weights_and_tolerates_rounding(tiny_config):
    assert "sharded over several processes" in reason(tiny_config)
    assert reason(tiny_config, parallel__shard=2) is None
    assert "need fp32" in reason(tiny_config, parallel__shard=2, model__kind="eigenstate")


@pytest.fixture(scope="module", params=LAYOUTS)
def report(request, launch):
    return launch("gathers_proof.py", *LAYOUTS[request.param])


def test_products_get_bfloat16_weights_and_the_same_hidden_states(report):
    wide, narrow = report["seen"]
    assert {weight for weight, _ in wide} == {"torch.float32"}
    assert {weight for weight, _ in narrow} == {"torch.bfloat16"}
    assert {hidden for _, hidden in narrow} == {hidden for _, hidden in wide}


def test_weights_and_moments_stay_fp32(report):
    assert report["kept"] == ["torch.float32"]


def test_the_first_step_differs_only_in_gradients_of_norms_and_biases(report):
    """Gains of 1 and biases of 0 are exact in bfloat16. Later values are rounded."""
    assert report["narrow"][0] == report["wide"][0]
    assert not [
        name for name in report["other"] if "norm" not in name and not name.endswith("bias")
    ]
    assert any(name.endswith("qkv.weight") for name in report["equal"])


def test_the_losses_stay_within_the_tolerance(report):
    tolerance = speedup_named("bf16-gathers").tolerance
    assert tolerance.holds(report["narrow"], report["wide"])
    assert report["narrow"][-1] < report["narrow"][0]
