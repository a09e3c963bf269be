"""The callback for the Trainer of transformers reports its steps, evaluations and saves."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

import flatout
from flatout.measure.watch.trainers import TrainerEvents


@pytest.fixture
def calls():
    """Records what the callback reports."""
    return Mock(steps=3)


@pytest.fixture
def events(calls):
    return TrainerEvents(calls, calls.finish)


def test_what_follows_a_step_is_named_in_the_trainers_order(events, calls):
    due = SimpleNamespace(should_log=True, should_evaluate=True, should_save=True)
    events.on_step_end(None, None, due)
    state = SimpleNamespace(global_step=3)
    events.on_log(None, state, None, logs={"loss": 2.5, "text": "no figure"})
    events.on_log(None, state, None, logs={"eval_loss": 2.0})  # the evaluation logs too
    events.on_evaluate(None, None, None)
    events.on_save(None, None, None)
    events.on_step_begin(None, None, None)
    assert [(name, *args) for name, args, _ in calls.method_calls] == [
        ("end_step",),
        ("enter", "logging"),
        ("log", {"loss": 2.5}),
        ("leave", "logging"),
        ("enter", "evaluation"),
        ("log", {"eval_loss": 2.0}),
        ("leave", "evaluation"),
        ("enter", "checkpoint"),
        ("leave", "checkpoint"),
        ("begin_step",),
    ]


def test_numbers_belong_to_the_trainers_step_of_this_process(events, calls):
    events.on_train_begin(None, SimpleNamespace(max_steps=90, global_step=50), None, model=None)
    events.on_log(None, SimpleNamespace(global_step=60), None, logs={"loss": 2.5})
    calls.log.assert_called_once_with({"loss": 2.5}, step=10)
    events.on_train_end(None, None, None)
    calls.finish.assert_called_once_with()


def test_what_did_not_happen_ends_with_the_next_step(events, calls):
    due = SimpleNamespace(should_log=False, should_evaluate=False, should_save=True)
    events.on_step_end(None, None, due)
    events.on_step_begin(None, None, None)
    assert calls.method_calls[-2:] == [call.leave("checkpoint"), call.begin_step()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of transformers
def test_a_real_trainer_is_watched(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs the package accelerate")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    tokens = torch.ones(16, dtype=torch.long)
    watch = flatout.watch()
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=40, save_steps=5, report_to=[], disable_tqdm=True, use_cpu=True
    )
    transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 400,
        callbacks=[watch.trainer_callback()],
    ).train()
    evidence = watch.evidence()
    assert watch.steps == 39
    assert evidence.planned_steps == 40
    assert evidence.phases.data_wait_s > 0
    assert evidence.phases.checkpoint_s > 0
