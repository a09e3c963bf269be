"""A dataset, an interrupted run and an unfinished prepare of an earlier version still work.

The files in `files/` were written by commit 186dc16 (2026-11-20), before the modules moved into
folders. The run was killed after step 10 of 40, the prepare after the first of three ranges. That
commit finished copies of both; the expected losses and digests are its results.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

import flatout
from flatout.cli import main

pytestmark = pytest.mark.slow

FILES = Path(__file__).parent / "files"
TRAIN_LOSS, VAL_LOSS = 4.956408977508545, 4.9542544447063825
FINISHED = {
    "train-00000.bin": "c387708f66dfb9d70057a0953686b46015aeefe3b46eeb585a0505be06966fb9",
    "train-documents.bin": "fb38cd749fa687dd5966bae3128bfd4875d17075d2f2faa20c831dc48b8ab1c4",
    "val-00000.bin": "4caeaf26541a2d9f04664bb05cecd33d3b0e19d31fd449ebfe88479f993188ac",
    "val-documents.bin": "70200ef0e216d5504530fc742d0f18fb8acc853411b92cff8053280dfb7cbd65",
    "tokenizer.json": "c5caf463c275cc86f7f37eb884fa93546299f71e3dd52f346573727fb4bd44f2",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A copy of the files, as the current directory."""
    copy = tmp_path / "files"
    shutil.copytree(FILES, copy)
    (copy / "unfinished").rename(copy / ".unfinished.part")
    for text in copy.glob("text*.txt"):
        os.utime(text, (1_700_000_000, 1_700_000_000))  # the plan contains a digest of these times
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


def test_the_unfinished_prepare_resumes_and_writes_the_same_bytes(files, capsys):
    texts = [f"text{number}.txt" for number in range(3)]
    options = ["--tokenizer", "train:300", "--split", "tail 0.1", "--workers", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["prepare", *texts, "--out", "unfinished", *options])
    assert not ended.value.code
    assert "1 of 3 ranges" in capsys.readouterr().err
    digests = {
        name: hashlib.sha256(Path("unfinished", name).read_bytes()).hexdigest() for name in FINISHED
    }
    assert digests == FINISHED
