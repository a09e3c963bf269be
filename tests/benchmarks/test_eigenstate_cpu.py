"""Implementations of an eigenstate network must agree before they are timed."""

from __future__ import annotations

import pytest
import torch


def small(benchmark):
    return benchmark.shape(2, d_model=16, num_eigenstates=8, num_heads=2, chunk_size=4)


def test_every_implementation_agrees_and_is_timed_in_every_round(benchmark):
    found = benchmark.measure(benchmark.comparisons(small(benchmark), 11), 2)
    assert list(found["comparisons"]) == ["recurrence", "layers", "products", "steps"]
    for comparison in found["comparisons"].values():
        assert [len(seconds) for seconds in comparison["seconds"].values()] == [2, 2]
        first, second = comparison["apart"].values()
        assert first == {"loss": 0.0, "gradient": 0.0}
        assert max(second.values()) <= comparison["tolerance"]
    text = benchmark.table(
        found
        | {
            "machine": "a machine",
            "threads": 1,
            "torch": "2",
            "layers": 2,
            "tokens": 11,
            "chunk_size": 4,
            "commit": "abc",
        }
    )
    assert "| layers token by token, against the fast path: step by step |" in text
    assert text.count("**") == 8


def test_the_shape_is_that_of_the_recipe(benchmark):
    model = benchmark.shape(3)
    assert (model["num_layers"], model["d_model"], model["num_eigenstates"]) == (3, 1024, 128)


def test_single_tokens_have_the_same_gradients_as_a_whole_sequence(benchmark):
    steps = benchmark.comparisons(small(benchmark), 9)[1].ways
    comparison = benchmark.comparisons(small(benchmark), 9)[3]
    (_, at_once), (_, by_token) = steps["reference"](), comparison.ways["step by step"]()
    torch.testing.assert_close(by_token, at_once, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("loss", "gradient"), [(1.001, 1.0), (1.0, 1.001), (float("nan"), 1.0)])
def test_a_different_result_ends_the_program(benchmark, loss, gradient):
    ways = {
        "plain": lambda: (1.0, torch.ones(3)),
        "fast": lambda: (loss, torch.full((3,), gradient)),
    }
    with pytest.raises(SystemExit, match="a title: fast differs"):
        benchmark.compared(benchmark.Comparison("name", "a title", 1e-4, ways))
