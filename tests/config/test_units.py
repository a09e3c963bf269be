"""Values of other tools become flatout's, in the unit that the tool counts in."""

from __future__ import annotations

import pytest

from flatout.config.convert import convert
from flatout.config.schema import nested, validate

STEPS = {"eval_strategy": "steps"}
NANOGPT = {"max_iters": 20, "block_size": 8}


def values_of(document):
    found = convert(document, [])
    validate(nested(found.values))
    return found.values


@pytest.mark.parametrize(
    ("document", "values"),
    [
        ({"devices": 4}, {"train.devices": 4}),
        ({"devices": -1}, {"train.devices": "all"}),
        ({"devices": 1}, {}),
        ({"devices": "auto"}, {}),
        ({"eval_strategy": "epoch"}, {"train.eval_every_epochs": 1}),
        ({"eval_strategy": "epoch", "eval_steps": 500}, {"train.eval_every_epochs": 1}),
        ({"eval_steps": 500, "eval_strategy": "epoch"}, {"train.eval_every_epochs": 1}),
        ({"eval_strategy": "steps", "eval_steps": 500}, {"train.eval_every": 500}),
        ({"eval_strategy": "no"}, {"train.eval_every": 0}),
        (STEPS | {"log_interval": 50}, {"train.eval_every": 50, "log.every": 50}),
        (STEPS | {"log_interval": 5, "eval_steps": 20}, {"train.eval_every": 20, "log.every": 5}),
        ({"eval_steps": 0.1, "num_epochs": 2}, {"train.eval_every_epochs": 0.2, "train.epochs": 2}),
        ({"save_steps": 0.5, "epochs": 1}, {"checkpoint.every_epochs": 0.5, "train.epochs": 1}),
        ({"eval_steps": 0.1, "max_steps": 50}, {"train.eval_every": 5, "train.steps": 50}),
        ({"eval_steps": 0.1, "epochs": 2, "max_tokens": 9}, {"train.tokens": 9}),
        ({"eval_steps": 0.1, "eval_strategy": "epoch"}, {"train.eval_every_epochs": 1}),
        ({"evals_per_epoch": 4}, {"train.eval_every_epochs": 0.25}),
        ({"evals_per_epoch": 0, "lr": 1e-3}, {"optim.lr": 1e-3}),
        ({"learning_rate": "2e-4"}, {"optim.lr": 2e-4}),
        (
            {"cosine_min_lr_ratio": "0.1", "learning_rate": "2e-4"},
            {"optim.lr": 2e-4, "schedule.min_lr": pytest.approx(2e-5)},
        ),
        ({"max_steps": "10", "n_layer": "2"}, {"train.steps": 10, "model.num_layers": 2}),
        ({"run_name": "10", "dtype": "16"}, {"log.run_name": "10", "train.precision": "fp16"}),
        ({"learning_rate": "2 rates", "max_steps": 1}, {"train.steps": 1}),
        ({"report_to": "none"}, {"log.to": []}),
        ({"report_to": ["tensorboard", "clearml"]}, {"log.to": ["tensorboard"]}),
        ({"report_to": "all"}, {}),
        ({"wandb_log": True}, {"log.to": ["tensorboard", "wandb"]}),
        ({"use_mlflow": True}, {"log.to": ["tensorboard", "mlflow"]}),
        ({"tensorboard": False}, {"log.to": []}),
        ({"tensorboard": False, "logger_name": "csv"}, {"log.to": ["csv"]}),
        (
            {"wandb": {"project": "mine", "name": "first", "enabled": False}},
            {"log.project": "mine", "log.run_name": "first"},
        ),
        (
            {"wandb_project": "mine", "wandb_tags": ["a"]},
            {"log.project": "mine", "log.tags": ["a"]},
        ),
        ({"wandb_mode": "dryrun"}, {"log.wandb_mode": "offline"}),
        ({"wandb_mode": "disabled"}, {}),
    ],
)
def test_values_are_counted_in_what_the_tool_counts(document, values):
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
)
def test_a_line_that_starts_late_is_wsd(document, kind):
    assert values_of(document)["schedule.kind"] == kind


@pytest.mark.parametrize(
    ("kind", "ratio", "values", "why"),
    [
        ("cosine", 0.4, {"schedule.kind": "cosine"}, "Only schedule.kind=wsd"),
        ("linear", 1.0, {"schedule.kind": "linear"}, "after the warm-up"),
        ("wsd", 0.4, {"schedule.kind": "wsd", "schedule.decay": 0.4}, ""),
    ],
)
def test_a_share_of_decay_needs_a_schedule_that_has_one(kind, ratio, values, why):
    found = convert({"decay_ratio": ratio, "decay_type": kind}, [])
    assert found.values == values
    assert why in found.items[0].why


@pytest.mark.parametrize(
    ("document", "outcome", "why"),
    [
        (NANOGPT | {"lr_decay_iters": 20}, "unnecessary", "The decay ends with the run."),
        (NANOGPT | {"lr_decay_iters": 10}, "missing", "at step 20, not at step 10"),
        (NANOGPT | {"lr_decay_iters": 30}, "missing", "at step 20, not at step 30"),
        (NANOGPT, "missing", "not at step 600000. It is the tool's default."),
        (NANOGPT | {"lr_decay_iters": 10, "decay_lr": False}, "unnecessary", "is constant"),
        ({"epochs": 2, "lr_decay_steps": 10}, "missing", "is not set"),
    ],
)
def test_a_decay_that_does_not_end_with_the_run_is_reported(document, outcome, why):
    items = convert(document, []).items
    (item,) = [item for item in items if item.key.startswith("lr_decay")]
    assert item.outcome == outcome
    assert why in item.why


def test_a_constant_rate_of_nanogpt_has_no_warm_up():
    values = values_of(NANOGPT | {"warmup_iters": 100, "decay_lr": False})
    assert (values["schedule.kind"], values["schedule.warmup"]) == ("constant", 0)
    assert "schedule.min_lr" not in values


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"eval_strategy": "steps"}, "eval_steps counts them."),
        ({"save_strategy": "steps"}, "save_steps counts them."),
        ({"init_from": "resume"}, "The same command resumes a run"),
        ({"init_from": "scratch"}, "A run starts with random weights"),
        ({"model_config": None}, "It is not set."),
        ({"devices": 1}, "flatout does this by default."),
        ({"devices": "auto"}, "One device is the default"),
        ({"rotary_pct": 1.0}, "flatout does this by default."),
        ({"wandb_mode": "disabled"}, "log.to names W&B"),
        ({"save_steps": 0.5, "save_strategy": "epoch"}, "save_strategy=epoch counts epochs"),
    ],
)
def test_what_needs_nothing_has_a_reason_for_its_value(document, why):
    item = convert(document, []).items[0]
    assert item.outcome == "unnecessary"
    assert item.why.startswith(why)


def test_a_logger_that_does_not_exist_here_is_missing():
    (item,) = convert({"report_to": ["clearml"]}, []).items
    assert item.outcome == "missing"
    assert "csv, mlflow, tensorboard, wandb" in item.why
