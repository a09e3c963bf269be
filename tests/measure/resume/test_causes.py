"""The causes of a difference follow from what differs, and when."""

from __future__ import annotations

import pytest

from flatout.config.schema import load_config
from flatout.measure.resume import compare as causes
from flatout.measure.resume.compare import Comparison, Difference, causes_of


def comparison(*, stop=(), end=("model/a",), values=(), first=None):
    found = [] if first is None else [Difference(first, "figure", "train/loss", "differs")]
    found += [Difference(5, "tensor", name, "differs") for name in stop]
    found += [Difference(10, "tensor", name, "differs") for name in end]
    found += [Difference(10, "value", name, "differs") for name in values]
    return Comparison(5, 10, different=found)


@pytest.mark.parametrize(
    ("found", "device", "expected"),
    [
        (comparison(first=3), "cpu", [causes.UNSEEDED, causes.UNORDERED]),
        (comparison(stop=["model/a"]), "cpu", [causes.UNSEEDED, causes.UNORDERED]),
        (comparison(stop=["a"]), "cuda", [causes.KERNELS, causes.UNSEEDED, causes.UNORDERED]),
        (comparison(first=6), "cpu", [causes.HIDDEN_STATE, causes.OWN_GENERATOR, causes.DATA]),
        (
            comparison(values=["values.loader.position"]),
            "cpu",
            [causes.DATA, causes.HIDDEN_STATE, causes.OWN_GENERATOR],
        ),
        (
            comparison(values=["ranks.0.rng_torch"]),
            "cpu",
            [causes.RANDOM, causes.HIDDEN_STATE, causes.OWN_GENERATOR, causes.DATA],
        ),
    ],
    ids=["losses before", "state before", "gpu", "after", "data", "random"],
)
def test_the_likely_causes_come_first(found, device, expected):
    assert causes_of(found, load_config().with_values({"train.device": device})) == expected


def test_an_optimizer_and_a_model_of_the_users_own_are_suspected():
    config = load_config().with_values({"optim.kind": "mine:SHAMPOO"})
    config = config.with_values({"train.device": "cpu"})
    found = causes_of(comparison(), config)
    assert causes.OPTIMIZER in found
    assert found[-1] == "Your own code in this recipe: mine:SHAMPOO."
