"""Values of other tools become flatout's, in the unit that the tool counts in."""

from __future__ import annotations

import pytest

from flatout.config.convert import convert
from flatout.config.overrides import nested
from flatout.config.schema import validate


def values_of(document):
    found = convert(document, [])
    validate(nested(found.values))
    return found.values


@pytest.mark.parametrize(
    ("devices", "values"),
    [(4, {"train.devices": 4}), (-1, {"train.devices": "all"}), (1, {}), ("auto", {})],
)
def test_several_devices_are_kept(devices, values):
    assert values_of({"devices": devices}) == values


@pytest.mark.parametrize(
    ("document", "values"),
    [
        ({"eval_strategy": "epoch"}, {"train.eval_every_epochs": 1}),
        ({"eval_strategy": "epoch", "eval_steps": 500}, {"train.eval_every_epochs": 1}),
        ({"eval_steps": 500, "eval_strategy": "epoch"}, {"train.eval_every_epochs": 1}),
        ({"eval_strategy": "steps", "eval_steps": 500}, {"train.eval_every": 500}),
        ({"eval_strategy": "no"}, {"train.eval_every": 0}),
        ({"evals_per_epoch": 4}, {"train.eval_every_epochs": 0.25}),
        ({"evals_per_epoch": 0, "lr": 1e-3}, {"optim.lr": 1e-3}),
    ],
    ids=["epoch", "epoch first", "epoch second", "steps", "off", "per epoch", "not per epoch"],
)
def test_evaluations_are_counted_in_what_the_tool_counts(document, values):
    assert values_of(document) == values


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"lr_scheduler_type": "linear"}, "linear"),
        ({"lr_scheduler_type": "linear", "warmdown_ratio": 1.0}, "linear"),
        ({"warmdown_ratio": 0.4, "lr_scheduler_type": "linear"}, "wsd"),
        ({"lr_scheduler_type": "linear", "warmdown_ratio": 0.4}, "wsd"),
        ({"num_train_epochs": 2, "per_device_train_batch_size": 4}, "linear"),
    ],
    ids=["linear", "decay from the start", "decay first", "decay second", "Trainer's default"],
)
def test_a_line_that_starts_late_is_wsd(document, kind):
    assert values_of(document)["schedule.kind"] == kind
