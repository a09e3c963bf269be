"""Tokens from anywhere become a dataset."""

import re
from pathlib import Path

import numpy as np
import pytest

import flatout
from flatout.cli.commands.verify import verify
from flatout.data.prepare.import_tokens import BLOCK_TOKENS
from flatout.data.tokenizers.make import of_characters
from flatout.errors import DataError

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
EOT = 256  # of the byte tokenizer


def split_of(dataset, name):
    split = dataset.split(name)
    return split.read_tokens(0, split.num_tokens).tolist(), split.document_ends.tolist()


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("tokens.npz", train=np.arange(200), val=np.arange(30))
    (example,) = re.findall(r"```python\n(.*?write_dataset.*?)```", PAGE.read_text(), re.DOTALL)
    exec(example, {})
    dataset = flatout.Dataset.open(tmp_path / "data" / "tokens")
    assert split_of(dataset, "train") == (list(range(200)), [200])
    assert split_of(dataset, "val") == (list(range(30)), [30])
    assert flatout.inspect("data/tokens").value("tokens") == 230


def test_documents_end_at_end_of_text_and_with_each_array(tmp_path):
    train = ([1, 2, EOT, 3], np.array([[4, 5], [6, EOT]], np.uint16), [], [7])
    made = flatout.write_dataset(tmp_path / "out", iter(train), [[8]], tokenizer="byte")
    assert split_of(made, "train") == ([1, 2, EOT, 3, 4, 5, 6, EOT, 7], [3, 4, 8, 9])
    assert split_of(made, "val") == ([8], [1])
    assert made.manifest.text_bytes == 8
    assert made.manifest.split_rule == "named"
    assert verify(tmp_path / "out").ok


def test_a_long_array_is_one_document(tmp_path):
    long = np.zeros(2 * BLOCK_TOKENS + 5, np.uint8)
    made = flatout.write_dataset(str(tmp_path / "out"), [long], [long[:9]], tokenizer="byte")
    assert split_of(made, "train")[1] == [len(long)]


def test_a_tokenizer_may_be_an_object(tmp_path):
    tokenizer = of_characters(["abc"])
    made = flatout.write_dataset(tmp_path / "out", [[0, 1]], [[2]], tokenizer=tokenizer)
    assert made.tokenizer.decode([0, 1, 2]) == "abc"


@pytest.mark.parametrize(
    ("train", "val", "tokenizer", "wanted"),
    [
        ([[1, 2]], [], "byte", "contain 2 tokens, but none for val"),
        ([], [[1]], "byte", "contain 1 token, but none for train"),
        ([[1], [2, 257]], [[1]], "byte", r"train, array 1, token 1: the id 257 is outside"),
        ([[1]], [[-1]], "byte", r"val, array 0, token 0: the id -1 is outside"),
        ([[1.5]], [[1]], "byte", "train, array 0 contains float64, not integers"),
        ([np.zeros((1, 1, 1), int)], [[1]], "byte", r"array 0 has the shape \(1, 1, 1\)"),
        ([[1]], [[1]], "char", "cannot be trained on them"),
    ],
)
def test_unusable_tokens_leave_nothing(tmp_path, train, val, tokenizer, wanted):
    with pytest.raises(DataError, match=wanted):
        flatout.write_dataset(tmp_path / "out", train, val, tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []
