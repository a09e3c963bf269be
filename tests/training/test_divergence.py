"""Bad steps in a whole run: skipped, logged, and reported when there are too many."""

import json
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from warm import run_ranks

from flatout.cli.commands.train import TrainResult
from flatout.errors import RunFailed, Stopped
from flatout.models import transformer
from flatout.training.checkpoint import catalog
from flatout.training.divergence import last_good
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow

PER_STEP = 8
"""Sequences in a step of the tiny configuration."""


class Allergic(transformer.MODEL):
    """A transformer whose loss is not a number on the sequences in `bad`."""

    bad: ClassVar[set[tuple[int, ...]]] = set()
    seen: ClassVar[list[bool]] = []
    """Whether each training batch contained one of them."""

    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        loss_sum, num_valid = super().forward(tokens_BT, targets_BT, doc_ids_BT)
        if not torch.is_grad_enabled():
            return loss_sum, num_valid
        is_bad = any(tuple(row) in self.bad for row in tokens_BT.tolist())
        self.seen.append(is_bad)
        return loss_sum * (math.nan if is_bad else 1.0), num_valid


@pytest.fixture
def allergic(tiny_config, build_run, tmp_path):
    """Return a function that makes a configuration whose model cannot bear some steps' data."""

    def make(*bad_steps, **changes):
        changes = {"log__every": 1, "speedups": "none", "train__steps": 10} | changes
        run = build_run(tiny_config(**changes), tmp_path / "look")
        Allergic.bad, Allergic.seen = set(), []
        for step in range(1, 40):
            batch = next(run.loader)
            if step in bad_steps:
                Allergic.bad.add(tuple(batch.sequences_ABW[0, 1, :-1].tolist()))
        return tiny_config(model__kind=f"{__name__}:Allergic", **changes)

    yield make
    Allergic.bad, Allergic.seen = set(), []


def test_a_bad_step_is_skipped_counted_and_logged_with_its_data(
    allergic, tmp_path, events, records
):
    summary = run_training(allergic(4), tmp_path / "run")
    assert summary["steps"] == 10
    (event,) = events(tmp_path / "run", "bad_step")
    assert event["step"] == 4
    assert event["position"] == [3 * PER_STEP, 4 * PER_STEP]
    assert event["reason"] == "the training loss is nan"
    trained = [record for record in records(tmp_path / "run") if "train/lr" in record]
    assert [record.get("train/skipped_steps") for record in trained] == [None] * 3 + [1.0] * 7
    assert ["train/loss" in record for record in trained] == [True] * 3 + [False] + [True] * 6
    assert math.isfinite(summary["train_loss"])
    assert summary["skipped_steps"] == 1
    assert RunLog(tmp_path / "run").summary["skipped_steps"] == 1
    shown = {name: summary[name] for name in summary.keys() & TrainResult.model_fields.keys()}
    assert TrainResult(**shown).bad() == "1 bad step: see events.jsonl"


def test_a_run_stopped_between_bad_steps_counts_on_as_the_uninterrupted_one(
    allergic, tmp_path, stop_at
):
    config = allergic(4, 5, 6, train__max_bad_steps=3)
    with pytest.raises(RunFailed, match="3 bad steps in a row, the last one step 6"):
        run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "parts", observers=[stop_at(5)])
    assert last_good(tmp_path / "parts") is None, "the checkpoint is from between bad steps"
    with pytest.raises(RunFailed, match="the last one step 6"):
        run_training(config, tmp_path / "parts")


def test_too_many_bad_steps_stop_the_run_with_a_report(allergic, tmp_path, events):
    config = allergic(6, 7, train__max_bad_steps=2, checkpoint__every_steps=2, checkpoint__keep=9)
    folder = tmp_path / "run"
    with pytest.raises(RunFailed, match=r"2 bad steps in a row.*step 7.*names its data") as found:
        run_training(config, folder)
    assert "Lower optim.lr" in found.value.fix
    assert f"--resume {folder}/checkpoints/step-4 --run-dir DIR" in found.value.fix
    assert read_exit_code(folder) == 1
    assert catalog.steps(folder) == [2, 4], "no save in between bad steps"
    (report,) = events(folder, "divergence")
    assert [bad["step"] for bad in report["bad_steps"]] == [6, 7]
    assert report["bad_steps"][1]["loss"] == "nan"
    assert report["last_good_checkpoint"].endswith("step-4")
    rows = {(row["shard"], row["token"]) for row in report["data"]}
    assert len(rows) == len(report["data"]) == PER_STEP
    assert all(row["documents"][0] <= row["documents"][1] for row in report["data"])


def test_a_new_run_starts_from_the_checkpoint_that_the_error_names(allergic, tmp_path):
    config = allergic(6, 7, train__max_bad_steps=2, checkpoint__every_steps=2)
    with pytest.raises(RunFailed, match="diverged"):
        run_training(config, tmp_path / "run")
    other = config.with_values({"optim.lr": 0.001, "train.max_bad_steps": 3})
    start = str(tmp_path / "run" / "checkpoints" / "step-4")
    assert run_training(other, tmp_path / "other", resume=start)["steps"] == 10


def test_the_sequence_at_fault_is_among_those_named(allergic, tmp_path, tiny_set, events):
    """The shard and the token in the report lead to the tokens that the model cannot bear."""
    with pytest.raises(RunFailed):
        run_training(allergic(3, train__max_bad_steps=1), tmp_path / "run")
    (report,) = events(tmp_path / "run", "divergence")
    manifest = json.loads((tiny_set / "manifest.json").read_text())
    found = []
    for row in report["data"]:
        shard = np.fromfile(tiny_set / row["shard"], manifest["dtype"])
        found.append(tuple(shard[row["token"] : row["token"] + 16].tolist()))
    assert Allergic.bad <= {*found}


@pytest.mark.parametrize(
    "shard",
    [pytest.param(1, id="ddp", marks=pytest.mark.faults), pytest.param(2, id="fully-shard")],
)
def test_two_processes_skip_the_same_steps(allergic, tmp_path, shard, losses):
    """Only the first process reads the bad sequences."""
    config = allergic(6, 7)
    run_training(config, tmp_path / "one")
    (tmp_path / "bad.json").write_text(json.dumps([*map(list, Allergic.bad)]))
    (tmp_path / "picky.py").write_text(PICKY)
    values = {"model.kind": "picky:Picky", "parallel.shard": shard}
    (tmp_path / "picky.yaml").write_text(yaml.safe_dump(config.with_values(values).to_dict()))
    words = ["-m", "flatout", "train", "picky.yaml", "--run-dir", "two"]
    done = run_ranks(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert RunLog(tmp_path / "two").summary["skipped_steps"] == 2
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


PICKY = """
import json
from pathlib import Path

from flatout.models import transformer
from warm import run_ranks
from flatout.training.run_dir.runlog import RunLog

BAD = {tuple(row) for row in json.loads(Path(__file__).with_name("bad.json").read_text())}


class Picky(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        loss_sum, num_valid = super().forward(tokens_BT, targets_BT, doc_ids_BT)
        is_bad = self.training and any(tuple(row) in BAD for row in tokens_BT.tolist())
        return loss_sum * (float("nan") if is_bad else 1.0), num_valid
"""
