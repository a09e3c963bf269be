"""The callback for the Trainer of transformers reports its steps, evaluations and saves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flatout.measure.watch.trainers import TrainerEvents


class Calls:
    """Records what a callback reports."""

    def __init__(self):
        self.made, self.steps = [], 3

    def __getattr__(self, name):
        return lambda *args, **named: self.made.append((name, *args))


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def events(calls):
    return TrainerEvents(calls, lambda: calls.made.append(("finish",)))


def control(**due):
    wanted = {"should_log": False, "should_evaluate": False, "should_save": False}
    return SimpleNamespace(**(wanted | due))


def test_what_follows_a_step_is_named_in_the_trainers_order(events, calls):
    events.on_step_end(None, None, control(should_log=True, should_evaluate=True, should_save=True))
    state = SimpleNamespace(global_step=3)
    events.on_log(None, state, None, logs={"loss": 2.5, "text": "no figure"})
    events.on_log(None, state, None, logs={"eval_loss": 2.0})  # the evaluation logs too
    events.on_evaluate(None, None, None)
    events.on_save(None, None, None)
    events.on_step_begin(None, None, None)
    assert calls.made == [
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


def test_figures_belong_to_the_trainers_step_of_this_process(events, calls):
    calls.log = lambda figures, *, step: calls.made.append((step, figures))
    events.on_train_begin(None, SimpleNamespace(max_steps=90, global_step=50), None, model=None)
    events.on_log(None, SimpleNamespace(global_step=60), None, logs={"loss": 2.5})
    assert calls.made[-1] == (10, {"loss": 2.5})


def test_what_did_not_happen_ends_with_the_next_step(events, calls):
    events.on_step_end(None, None, control(should_save=True))
    events.on_step_begin(None, None, None)
    assert calls.made[-2:] == [("leave", "checkpoint"), ("begin_step",)]


def test_the_end_of_training_ends_the_watch(events, calls):
    events.on_train_begin(None, SimpleNamespace(max_steps=10, global_step=0), None, model=None)
    events.on_train_end(None, None, None)
    assert [name for name, *_ in calls.made] == ["learn", "finish"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of transformers
def test_a_real_trainer_is_watched(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    import flatout

    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    rows = [{"input_ids": torch.ones(16, dtype=torch.long)} for _ in range(400)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    watch = flatout.watch()
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=40, save_steps=5, report_to=[], disable_tqdm=True, use_cpu=True
    )
    transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=rows,
        callbacks=[watch.trainer_callback()],
    ).train()
    evidence = watch.evidence()
    assert watch.steps == 39
    assert evidence.planned_steps == 40
    assert evidence.phases.data_wait_s > 0
    assert evidence.phases.checkpoint_s > 0
