"""Weights gathered in bfloat16 are rounded as in autocast, and stay fp32 in their shards."""

import pytest
import torch

from flatout.assembly.choices import assemble, speedup_named
from flatout.assembly.memory import gather_dtype
from flatout.config.registry import MODELS

pytestmark = pytest.mark.slow

LAYOUTS = {"fully_shard": (2, 2), "hsdp": (4, 2)}


def test_a_transformer_under_bf16_is_gathered_in_it():
    for kind, speedups, dtype in (
        ("transformer", ["bf16"], torch.bfloat16),
        ("transformer", [], None),
        ("eigenstate", ["bf16"], None),
    ):
        assert gather_dtype(MODELS.get(kind), assemble(speedups)) is dtype


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
    tolerance = speedup_named("bf16").tolerance
    assert report["narrow"] == pytest.approx(report["wide"], rel=tolerance.rtol, abs=0)
    assert report["narrow"][-1] < report["narrow"][0]
