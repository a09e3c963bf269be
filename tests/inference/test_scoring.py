"""Scores of a loaded run."""

import math

import numpy as np
import pytest

from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.errors import DataError
from flatout.inference.load import load_run
from flatout.inference.scoring import score_run


def test_a_loaded_run_reproduces_the_score_of_the_run(fox_run):
    root, result = fox_run
    loaded = load_run(root / "runs" / "fox", "last", device="cpu", precision="trained")
    found = score_run(loaded)
    assert found.loss == pytest.approx(result.val_loss, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(result.val_loss), rel=1e-6)
    split = loaded.dataset.split("val")
    assert found.tokens == split.num_tokens - 1
    bits = found.loss * found.tokens / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / split.text_bytes)
    assert not loaded.model.training


def test_part_of_the_text_has_no_bits_per_byte(fox_run):
    loaded = load_run(fox_run[0] / "runs" / "fox", device="cpu")
    found = score_run(loaded, max_tokens=64)
    assert found.bits_per_byte is None
    assert found.tokens < loaded.dataset.split("val").num_tokens - 1


def test_data_without_validation_text_is_rejected(fox_run, tmp_path):
    loaded = load_run(fox_run[0] / "runs" / "fox", device="cpu")
    tokens = np.array(loaded.tokenizer.encode("the quick brown fox " * 9))
    with DatasetWriter(tmp_path / "data", loaded.tokenizer) as writer:
        writer.append("train", tokens, [len(tokens)], text_bytes=len(tokens))
        writer.finish(source={}, split_rule="none")
    with pytest.raises(DataError, match="no validation text"):
        score_run(loaded, data=[tmp_path / "data"])


def test_given_datasets_weigh_as_much_as_the_tokens_that_are_predicted(fox_run, tmp_path):
    loaded = load_run(fox_run[0] / "runs" / "fox", device="cpu")
    paths = []
    for text, every in (("The quick brown fox ", 9), ("zyx wvu tsr qpo ", 1)):
        tokens = np.array(loaded.tokenizer.encode(text * 20))
        mask = (np.arange(len(tokens)) % every == 0).astype(np.uint8)
        paths.append(tmp_path / f"every-{every}")
        with DatasetWriter(paths[-1], loaded.tokenizer) as writer:
            for split in ("train", "val"):
                writer.append(split, tokens, [len(tokens)], text_bytes=int(mask.sum()), mask=mask)
            writer.finish(source={}, split_rule="by hand")
    found = score_run(loaded, data=paths)
    few, many = found.by_dataset
    assert (few.tokens, many.tokens) == (44, 319)
    assert abs(few.loss - many.loss) > 0.1
    nats = few.loss * few.tokens + many.loss * many.tokens
    assert found.loss == pytest.approx(nats / found.tokens)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / (45 + 320))
