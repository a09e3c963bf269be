"""The benchmark of fine-tuning with and without a loss mask."""

from __future__ import annotations

import random

import pytest

import flatout


@pytest.mark.slow
def test_both_ways_have_equal_tokens_and_one_has_a_mask(benchmark, tmp_path):
    benchmark.write_data(tmp_path, seed=0, count=60)
    masked, all_tokens = (flatout.Dataset.open(tmp_path / name) for name in benchmark.WAYS)
    assert masked.split("train").has_mask
    assert not all_tokens.split("train").has_mask


def test_answers_are_the_numbers_of_the_names(benchmark):
    numbers = benchmark.table_of(0)
    turns = benchmark.conversation(random.Random(0), numbers)
    for asked, answered in zip(turns[::2], turns[1::2], strict=True):
        assert answered["content"] == numbers[asked["content"].split()[-1].removesuffix("?")]


def test_the_table_has_a_row_for_each_way_and_step(benchmark):
    rows = [
        {"way": way, "steps": 50, "seed": seed, "loss": 1.0 + seed, "accuracy": seed / 4}
        for way in benchmark.WAYS
        for seed in range(3)
    ]
    found = {"machine": "a machine", "commit": "abc", "seeds": 3, "steps": [50], "rows": rows}
    text = benchmark.table(found | {"base_steps": 1, "asked": 100})
    assert "| 50 | the assistant's turns | 25 (0 to 50) | 2.000 (1.000 to 3.000) |" in text
    assert "| 50 | all tokens | 25 (0 to 50) |" in text
