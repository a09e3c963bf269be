"""`flatout eval`: the scores of a trained model."""

import math
import shutil

import pytest
from tiny import TINY_SHAPE

from flatout.cli.commands.eval import evaluate
from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.train import train
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import CheckpointError, DataError
from flatout.training.run_dir.layout import read_config, write_config
from flatout.training.run_dir.runlog import RunLog


def test_scores_equal_those_of_the_run(tiny_run):
    result = evaluate(str(tiny_run), "last")
    assert result.val_loss == pytest.approx(RunLog(tiny_run).summary["val_loss"], rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.val_loss))
    data = tiny_run.parent.parent / "data"
    split = Dataset.open(data).split("val")
    assert result.tokens == split.num_tokens - 1
    bits = result.val_loss * result.tokens / math.log(2) / split.text_bytes
    assert result.bits_per_byte == pytest.approx(bits)
    for part in (f"{result.val_loss:.4f}", "step-2", f"{result.bits_per_byte:.4f}"):
        assert part in result.summary()
    (one,) = result.by_dataset
    assert (one.name, one.path) == ("data", str(data))
    figures = ("val_loss", "bits_per_byte", "tokens")
    assert all(getattr(one, name) == getattr(result, name) for name in figures)


@pytest.fixture(scope="module")
def mixed_run(tiny_run, tmp_path_factory):
    """A run on a mix (3:1) of the tiny run's data and another dataset; and that dataset."""
    root, data = tmp_path_factory.mktemp("mixed"), tiny_run.parent.parent / "data"
    text, tale = root / "tale.txt", root / "tale"
    text.write_text("It fell; the night in torrents and a stormy dark rain was. " * 150)
    tokenizer = str(data / "tokenizer.json")
    prepare([str(text)], tale, tokenizer=tokenizer, split="tail 0.2", workers=1)
    config = load_config(None, [*TINY_SHAPE, f"data.mix={{{data}: 3, {tale}: 1}}", "train.steps=2"])
    return root / "run", train(config, run=root / "run"), tale


@pytest.mark.slow
def test_a_mix_has_a_line_per_dataset_and_a_total(mixed_run):
    folder, trained, _ = mixed_run
    result = evaluate(str(folder), "last")
    assert [one.name for one in result.by_dataset] == ["data", "tale"]
    assert result.val_loss == pytest.approx(trained.val_loss, rel=1e-6)
    losses = [one.val_loss for one in result.by_dataset]
    assert result.val_loss == pytest.approx(0.75 * losses[0] + 0.25 * losses[1])
    assert [one.val_loss for one in trained.by_dataset] == pytest.approx(losses, rel=1e-6)
    lines = result.summary().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["dataset", "data", "tale", "total"]
    for line, one in zip(lines[2:], [*result.by_dataset, result], strict=True):
        assert f"{one.val_loss:.4f}" in line
        assert f"{one.bits_per_byte:.4f}" in line
    assert "tale" in trained.summary()


def test_given_datasets_are_weighted_by_their_tokens(tiny_run, mixed_run):
    tale, own = mixed_run[2], tiny_run.parent.parent / "data"
    alone = evaluate(str(tiny_run), data=[tale])
    assert [one.path for one in alone.by_dataset] == [str(tale)]
    both = evaluate(str(tiny_run), data=[own, tale])
    found = both.by_dataset
    assert found[1].val_loss == pytest.approx(alone.val_loss)
    loss = sum(one.val_loss * one.tokens for one in found) / both.tokens
    assert both.val_loss == pytest.approx(loss)
    sizes = [Dataset.open(one.path).split("val").text_bytes for one in found]
    bits = sum(one.bits_per_byte * size for one, size in zip(found, sizes, strict=True))
    assert both.bits_per_byte == pytest.approx(bits / sum(sizes))


def test_data_with_another_tokenizer_and_missing_data_are_rejected(tiny_run, tmp_path):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 50)
    prepare([str(tmp_path / "book.txt")], tmp_path / "bytes", tokenizer="byte", workers=1)
    with pytest.raises(CheckpointError, match=r"a different tokenizer.*--tokenizer"):
        evaluate(str(tiny_run), data=[tmp_path / "bytes"])
    with pytest.raises(DataError, match="nowhere"):
        evaluate(str(tiny_run), data=[tmp_path / "nowhere"])


@pytest.fixture
def moved(tiny_run, tmp_path):
    """Return the run in a copy of its project. The original path of its data does not exist."""
    run = shutil.copytree(tiny_run, tmp_path / "new" / "runs" / "tiny")
    shutil.copytree(tiny_run.parent.parent / "data", tmp_path / "new" / "data")
    config = read_config(run)
    write_config(run, config.with_values({"data.path": str(tmp_path / "old" / "data")}))
    return run


def test_missing_data_is_named_with_the_option_for_its_new_path(moved):
    with pytest.raises(DataError, match=r"old/data.*`flatout eval .*tiny --data PATH`"):
        evaluate(moved)
    assert evaluate(moved, data=[moved.parent.parent / "data"]).val_loss > 0


def test_max_tokens_scores_a_part(tiny_run):
    result = evaluate(str(tiny_run), max_tokens=64)
    assert result.bits_per_byte is None
    assert "Bits per byte are unknown" in result.summary()
    with pytest.raises(CheckpointError):
        evaluate(str(tiny_run), "77")
