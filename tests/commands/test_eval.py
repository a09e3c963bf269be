"""`flatout eval`: the scores of a trained model."""

import math

import pytest

from flatout.commands.eval import evaluate
from flatout.data.shards import Dataset
from flatout.errors import CheckpointError
from flatout.training.folder import read_summary


def test_scores_are_the_runs_own(tiny_run):
    result = evaluate(str(tiny_run), "last")
    assert result.val_loss == pytest.approx(read_summary(tiny_run)["val_loss"], rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.val_loss))
    split = Dataset.open(tiny_run.parent.parent / "data").split("val")
    assert result.tokens == split.num_tokens - 1
    assert result.bits_per_byte == pytest.approx(result.val_loss * result.tokens / math.log(2) / split.text_bytes)
    for part in (f"{result.val_loss:.4f}", "step-2", f"{result.bits_per_byte:.4f}"):
        assert part in result.summary()


def test_a_part(tiny_run):
    result = evaluate(str(tiny_run), max_tokens=64)
    assert result.bits_per_byte is None
    assert "unknown" in result.summary()


def test_unknown_checkpoint(tiny_run):
    with pytest.raises(CheckpointError):
        evaluate(str(tiny_run), "77")
