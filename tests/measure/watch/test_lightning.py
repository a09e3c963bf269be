"""The callback for Lightning's Trainer reports its steps and evaluations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from watching import batches

import flatout
from flatout.measure.watch.trainers import LightningEvents


@pytest.mark.slow
def test_steps_and_evaluations_are_reported():
    watch = flatout.watch()
    ends = []
    events = LightningEvents(watch._loop, lambda: ends.append(watch._loop.close()))
    trainer = SimpleNamespace(estimated_stepping_batches=40, logged_metrics={"train_loss": 2.0})
    events.on_train_start(trainer, None)
    for number, batch in enumerate(batches(40)):
        events.on_train_batch_start(trainer, None, batch, number)
        events.on_train_batch_end(trainer, None, None, batch, number)
    events.on_validation_start(trainer, None)
    events.on_validation_end(trainer, None)
    evidence = watch.evidence()
    events.on_train_end(trainer, None)
    assert ends == [True]
    assert watch.steps == 39
    assert evidence.planned_steps == 40
    assert evidence.phases.evaluation_s is not None
    assert {loss for _, loss in evidence.losses} == {2.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_real_trainer_is_watched(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    demos = pytest.importorskip("lightning.pytorch.demos.boring_classes")
    watch, model = flatout.watch(), demos.BoringModel()
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        max_steps=40,
        callbacks=[watch.lightning_callback()],
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    trainer.fit(model)
    assert watch.steps >= 38
    assert watch.evidence().phases.data_wait_s > 0
