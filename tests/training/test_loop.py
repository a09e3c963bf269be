"""`train.patience`: a run ends that many evaluations after its best one, even across stops."""

import json

import numpy as np
import pytest

from flatout.cli.commands.runs import runs
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError, Stopped
from flatout.inference.load import load_run
from flatout.training import finish, loop
from flatout.training.checkpoint import catalog
from flatout.training.evaluation import Evaluation, SplitScore
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code
from flatout.training.run_dir.lookup import find_checkpoint
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow

LOSSES = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 3.5, 12: 1.0, 14: 2.0, 16: 2.0, 18: 2.0, 20: 0.5}
"""Validation losses by step: step 4 is the best of the first 11, and step 8 only equals it."""


@pytest.fixture
def patient(tiny_config, monkeypatch):
    """Return a function that makes configurations of 20 steps, whose evaluations return LOSSES."""
    monkeypatch.setattr(
        loop,
        "score",
        lambda run, **_: Evaluation((SplitScore("tiny", "", 1.0, LOSSES[run.step], 64, 0),)),
    )

    def make(**changes):
        return tiny_config(
            **{"train__steps": 20, "train__eval_every": 2, "train__patience": 2} | changes
        )

    return make


def val_steps(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r["step"] for r in records if "val/loss" in r]


@pytest.mark.parametrize(
    ("first", "stopped", "then", "end"), [(4, 9, 2, 10), (2, 7, 4, 8), (2, 7, 2, 8)]
)
def test_patience_counts_the_evaluations_that_were_done(
    patient, tmp_path, stop_at, first, stopped, then, end
):
    """Step 4 is the best. A resume with another interval does not change how many came since."""
    config = patient(train__eval_every=first)
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(stopped)])
    summary = run_training(patient(train__eval_every=then), tmp_path / "run")
    assert (summary["steps"], summary["best_step"], summary["stopped_early"]) == (end, 4, True)
    assert len([step for step in val_steps(tmp_path / "run") if step > 4]) == 2


def test_without_best_checkpoints_only_intervals_and_the_end_are_saved(patient, tmp_path, events):
    interval = {"checkpoint__every_steps": 8, "checkpoint__keep": 9, "train__patience": 0}
    saved = {}
    for best in (True, False):
        folder = tmp_path / str(best)
        summary = run_training(patient(checkpoint__best=best, **interval), folder)
        assert (summary["best_step"], summary["best_val_loss"]) == (20, 0.5)
        saved[best] = catalog.steps(folder)
        assert catalog.best(catalog.latest(folder)).name == "step-20"
    assert saved == {True: [2, 4, 8, 12, 16, 20], False: [8, 16, 20]}


def test_an_interval_is_saved_at_the_best_step_too(patient, tmp_path):
    interval = {"checkpoint__every_steps": 4, "checkpoint__keep": 9}
    run_training(patient(checkpoint__best=False, **interval), tmp_path / "run")
    assert catalog.steps(tmp_path / "run") == [4, 8]


def test_a_best_step_without_a_checkpoint_means_the_last_one(patient, tmp_path):
    config = patient(train__steps=10, train__patience=0, checkpoint__best=False)
    summary = run_training(config, tmp_path / "run")
    assert summary["best_step"] == 4
    assert find_checkpoint(tmp_path / "run").name == "step-10"


def test_a_run_that_ends_early_is_finished(patient, tmp_path, events):
    summary = run_training(patient(), tmp_path / "run")
    assert summary["steps"] == 8
    assert summary["stopped_early"] is True
    assert summary["stopped_because"] == (
        "No better validation loss in 2 evaluations: "
        "best 3.0000 at step 4, stopped at step 8 of 20."
    )
    assert (summary["best_step"], summary["best_val_loss"]) == (4, 3.0)
    assert summary["val_loss"] == LOSSES[8]
    assert val_steps(tmp_path / "run") == [2, 4, 6, 8]
    reasons = [event["reason"] for event in events(tmp_path / "run", "early_stop")]
    assert reasons == [summary["stopped_because"]]
    assert RunLog(tmp_path / "run").summary == summary
    assert read_exit_code(tmp_path / "run") == 0
    assert catalog.steps(tmp_path / "run") == [4, 8]
    (item,) = runs(tmp_path).items
    assert (item.state, item.step, item.last_step) == ("finished", 8, 20)
    assert load_run(tmp_path / "run").checkpoint == catalog.checkpoint_path(tmp_path / "run", 4)


def test_the_whole_validation_split_is_scored_once_at_the_end(patient, tmp_path, monkeypatch):
    """The last evaluation is reused if it scored the whole split."""
    scored = []
    monkeypatch.setattr(finish, "score", lambda run, **_: scored.append(run.step))
    run_training(patient(), tmp_path / "run")
    assert scored == []
    run_training(patient(train__eval_tokens=64), tmp_path / "part")
    assert scored == [8]


@pytest.mark.parametrize("change", ["train.eval_tokens", "data.path"])
def test_changed_validation_tokens_restart_the_count(
    patient, tmp_path, stop_at, write_tiny, change, events
):
    others = {
        "train.eval_tokens": 64,
        # the last of 40 documents is for validation
        "data.path": str(write_tiny(tmp_path / "data", num_documents=39)),
    }
    with pytest.raises(Stopped):
        run_training(patient(), tmp_path / "run", observers=[stop_at(7)])
    summary = run_training(patient().with_values({change: others[change]}), tmp_path / "run")
    assert (summary["steps"], summary["best_step"]) == (16, 12), (
        "step 4 scored other text: step 8 counts first, and step 12 is the best"
    )
    texts = [event["text"] for event in events(tmp_path / "run", "difference")]
    assert [text for text in texts if "earlier best" in text] == [
        "The validation tokens have changed: losses do not compare with the earlier best "
        "(3.0000 at step 4). The best loss and train.patience start afresh."
    ]


def test_the_same_command_returns_the_summary(patient, tmp_path):
    first = run_training(patient(), tmp_path / "run")
    before = (tmp_path / "run" / "events.jsonl").read_text()
    assert run_training(patient(), tmp_path / "run") == first
    assert (tmp_path / "run" / "events.jsonl").read_text() == before


def test_more_patience_resumes_training(patient, tmp_path):
    whole = run_training(patient(train__patience=0), tmp_path / "whole")
    run_training(patient(), tmp_path / "run")
    summary = run_training(patient(train__patience=4), tmp_path / "run")
    assert (summary["steps"], summary["stopped_early"], summary["stopped_because"]) == (
        20,
        False,
        None,
    )
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert run_training(patient(), tmp_path / "run") == summary


def test_a_run_that_starts_from_another_one_has_its_own_best(patient, tmp_path):
    """The other one ran out of patience at step 8, and its best checkpoint is not here."""
    run_training(patient(), tmp_path / "run")
    new = patient(optim__lr=1e-3)
    summary = run_training(new, tmp_path / "new", resume=str(tmp_path / "run"))
    assert (summary["steps"], summary["best_step"], summary["best_val_loss"]) == (16, 12, 1.0)
    assert val_steps(tmp_path / "new") == [10, 12, 14, 16]
    assert find_checkpoint(tmp_path / "new", "best").name == "step-12"


def test_the_count_survives_a_stop(patient, tmp_path, stop_at):
    whole = run_training(patient(), tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(patient(), tmp_path / "run", observers=[stop_at(7)])
    resumed = run_training(patient(), tmp_path / "run")
    assert (resumed["steps"], resumed["stopped_because"]) == (
        whole["steps"],
        whole["stopped_because"],
    )
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_a_kill_during_the_end_is_completed_by_the_next_start(patient, tmp_path, killed_in):
    with killed_in(finish, "score"):
        run_training(patient(train__eval_tokens=64), tmp_path / "run")
    summary = run_training(patient(train__eval_tokens=64), tmp_path / "run")
    assert (summary["steps"], summary["stopped_early"]) == (8, True)


def test_a_run_that_reaches_its_last_step_did_not_stop_early(patient, tmp_path):
    summary = run_training(patient(train__steps=8), tmp_path / "run")
    assert (summary["steps"], summary["stopped_early"]) == (8, False)


@pytest.fixture
def unvalidated(tiny_config, tmp_path):
    """The configuration of a run on data without validation text."""
    tokenizer = make_tokenizer("byte", lambda _: [])
    with DatasetWriter(tmp_path / "data", tokenizer) as writer:
        tokens = np.array(tokenizer.encode("a run, a loss, a model. " * 40))
        writer.append("train", tokens, [len(tokens)], text_bytes=len(tokens))
        writer.finish(source={}, split_rule="none")
    return tiny_config(data__path=str(tmp_path / "data"), train__eval_every=2)


def test_without_validation_text_patience_is_rejected_and_nothing_is_evaluated(
    unvalidated, tmp_path, stop_at
):
    patient = unvalidated.with_values({"train.patience": 1})
    with pytest.raises(DataError, match="no validation text"):
        run_training(patient, tmp_path / "run")
    with pytest.raises(Stopped):
        run_training(unvalidated, tmp_path / "run", observers=[stop_at(3)])
    with pytest.raises(DataError, match="no validation text"):
        run_training(patient, tmp_path / "run")
    summary = run_training(unvalidated, tmp_path / "run")
    assert (summary["val_loss"], summary["best_val_loss"], summary["by_dataset"]) == (
        None,
        None,
        [],
    )
    assert val_steps(tmp_path / "run") == []
