"""The dataset of an earlier version verifies, and its run can be evaluated and sampled.

The files in `files/` were written by commit 186dc16 (2026-11-20), before the modules moved into
folders. The run was killed after step 10 of 40. That commit finished a copy of it with the loss
below. Runs of unreleased versions are not resumed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import flatout

pytestmark = pytest.mark.slow

FILES = Path(__file__).parent / "files"
VAL_LOSS = 4.9542544447063825


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


def test_its_checkpoint_can_be_evaluated_and_sampled(files):
    score = flatout.evaluate("run", data=["data"])
    assert VAL_LOSS < score.val_loss < 5.6
    assert flatout.sample("run", prompt="the ", max_tokens=4, seed=0).samples
