"""A dataset and an interrupted run of an earlier version still work.

The files in `files/` were written by commit 186dc16 (2026-11-20), before the modules moved into
folders. The run was killed after step 10 of 40. That commit finished a copy of it; the expected
losses are its results.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import flatout

pytestmark = pytest.mark.slow

FILES = Path(__file__).parent / "files"
TRAIN_LOSS, VAL_LOSS = 4.956408977508545, 4.9542544447063825


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A copy of the files, as the current directory."""
    copy = tmp_path / "files"
    shutil.copytree(FILES, copy)
    monkeypatch.chdir(copy)
    return copy


def test_the_dataset_verifies(files):
    assert flatout.verify("data").ok
    assert flatout.Dataset.open(files / "data").manifest.tokens == 8_363


def test_the_interrupted_run_resumes_and_ends_with_the_same_losses(files):
    result = flatout.train("recipe.yaml", run="run")
    assert (result.steps, result.tokens) == (40, 10_240)
    assert result.resumed_from is not None
    assert Path(result.resumed_from).name == "step-10"
    assert result.train_loss == pytest.approx(TRAIN_LOSS, rel=1e-5)
    assert result.val_loss == pytest.approx(VAL_LOSS, rel=1e-5)


def test_its_checkpoint_can_be_evaluated_and_sampled(files):
    score = flatout.evaluate("run", data=["data"])
    assert VAL_LOSS < score.val_loss < 5.6
    assert flatout.sample("run", prompt="the ", max_tokens=4, seed=0).samples


def test_its_checkpoint_starts_another_run(files):
    result = flatout.train("recipe.yaml", run="other", resume="run/checkpoints/step-10")
    assert result.steps == 40
    assert result.train_loss == pytest.approx(TRAIN_LOSS, rel=1e-5)
