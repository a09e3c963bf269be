"""The benchmark of updating split weights runs, and its table has every implementation."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("split_update")


def test_every_implementation_is_timed_and_compared_bit_by_bit(benchmark):
    found = benchmark.measure("cpu", 2, {"tiny": (24, 1, 8)})
    assert [(row["update"], row["way"]) for row in found["rows"]] == [
        (update, way) for update in ("AdamW", "Muon") for way in benchmark.WAYS
    ]
    assert {len(row["seconds"]) for row in found["rows"]} == {2}
    assert [row["equal"] for row in found["rows"] if "equal" in row] == [
        1.0,
        1.0,
    ]  # without a GPU, both use torch
    text = benchmark.table(found)
    assert "this says nothing about a GPU" in text
    assert text.count("| tiny |") == 6


def test_the_sizes_are_those_of_the_recipes(benchmark):
    weights = {
        model: sum(
            rows * columns
            for rows, columns in [(vocabulary, width), *benchmark.hidden(layers, width)]
        )
        for model, (vocabulary, layers, width) in benchmark.SIZES.items()
    }
    assert weights == {"GPT-2 124M": 123_568_128, "GPT-2 700M": 756_744_192}
