"""Scores of a loaded run."""

import math

import numpy as np
import pytest

from flatout.config.schema import RunConfig
from flatout.data.prepare.writer import DatasetWriter
from flatout.errors import DataError
from flatout.inference.evaluate import evaluate
from flatout.inference.load import load_run


def test_a_loaded_run_scores_what_the_run_scored(fox_run):
    root, result = fox_run
    loaded = load_run(root / "runs" / "fox", "last", device="cpu", precision="trained")
    score = evaluate(loaded)
    assert score.loss == pytest.approx(result.val_loss, rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(result.val_loss), rel=1e-6)
    split = loaded.dataset.split("val")
    assert score.tokens == split.num_tokens - 1
    assert score.bits_per_byte == pytest.approx(
        score.loss * score.tokens / math.log(2) / split.text_bytes
    )
    assert isinstance(loaded.config, RunConfig)
    assert not loaded.model.training


def test_a_part_of_the_text_has_no_bits_per_byte(fox_run):
    loaded = load_run(fox_run[0] / "runs" / "fox", device="cpu")
    score = evaluate(loaded, max_tokens=64)
    assert score.bits_per_byte is None
    assert score.tokens < loaded.dataset.split("val").num_tokens - 1


def test_data_without_validation_text_cannot_be_scored(fox_run, tmp_path):
    loaded = load_run(fox_run[0] / "runs" / "fox", device="cpu")
    tokens = np.array(loaded.tokenizer.encode("the quick brown fox " * 9))
    with DatasetWriter(tmp_path / "data", vocab_size=loaded.tokenizer.vocab_size) as writer:
        writer.train.append(tokens, [len(tokens)], text_bytes=len(tokens))
        writer.finish(tokenizer=loaded.tokenizer, source={}, split_rule="none")
    with pytest.raises(DataError, match="no validation text"):
        evaluate(loaded, data=[tmp_path / "data"])
