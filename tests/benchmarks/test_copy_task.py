"""The copy task can be learned with memory, and the table marks rows where it was not."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_learned_and_unlearned_rows_are_distinguished(benchmark):
    forms = {
        name: keys
        for name, keys in benchmark.forms(16).items()
        if name in ("long-memory", "published")
    }
    runs = [
        {"distance": 16, "form": name, "seed": 0} | benchmark.trained(16, keys, 0, 60)
        for name, keys in forms.items()
    ]
    learned, never = runs
    assert learned["loss"] < benchmark.LEARNED
    assert 0 < learned["right_after_steps"] < learned["steps"] < 60
    assert (never["steps"], never["right_after_steps"]) == (60, None)
    assert never["accuracy"] < 1
    text = benchmark.table(
        {
            "machine": "a machine",
            "commit": "abc",
            "seeds": 1,
            "steps": 60,
            "shape": benchmark.SHAPE,
            "runs": runs,
        }
    )
    assert "| 16 | published | 0 of 1 | never |" in text
    assert "| 1 of 1 | {0} ({0} to {0}) |".format(learned["right_after_steps"]) in text


def test_at_long_distances_only_the_plain_form_is_tried(benchmark):
    assert list(benchmark.forms(16384)) == [
        "long-memory",
        "long-memory, memory of four sequences",
        "published",
    ]
    assert benchmark.forms(16384)["long-memory, memory of four sequences"] == {"memory": 65540}


def test_a_row_ends_with_the_question(benchmark):
    assert benchmark.rows_of(4)[3].tolist() == [3, 8, 8, 8, 9]
