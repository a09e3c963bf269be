"""A dataset that was prepared with other tokenizers than the recipe's is named at the start."""

import pytest

from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.train import train
from flatout.errors import UsageError

RECIPE = "data: {tokenizer: byte}\nmodel: {vocab_size: 256}\n"


def test_prepare_takes_the_tokenizer_of_a_recipe(tmp_path):
    (tmp_path / "book.txt").write_text("Some text. " * 50)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    source, recipe = str(tmp_path / "book.txt"), tmp_path / "mine.yaml"
    assert "tokenizer  byte" in prepare(source, tmp_path / "data", recipe=recipe).summary()
    with pytest.raises(UsageError, match="--tokenizer and --recipe cannot be combined"):
        prepare(source, tmp_path / "chars", tokenizer="char", recipe=recipe)
    with pytest.raises(UsageError, match="The recipe demo names no tokenizer"):
        prepare(source, tmp_path / "other", recipe="demo")


@pytest.mark.parametrize(("rows", "is_named"), [(50_304, True), (257, False), (2_000, False)])
def test_unused_rows_of_the_embedding_are_named(tiny_config, tmp_path, messages, rows, is_named):
    config = tiny_config(model__vocab_size=rows, data__tokenizer="openai-community/gpt2")
    train(config, run=tmp_path / "run", progress=messages)
    found = [line for line in messages.lines if "never used" in line]
    assert bool(found) is is_named
    if is_named:
        assert "has 257 tokens and the model 50,304: 99% of its embedding" in found[0]
        assert "`flatout prepare ... --recipe tiny`" in found[0]
