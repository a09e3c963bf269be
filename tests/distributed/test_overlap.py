"""Gradients of a compiled model are reduced during its backward pass."""

import pytest

pytestmark = pytest.mark.slow


def last_piece(events):
    return len(events) - 1 - events[::-1].index("backward")


@pytest.mark.thorough
def test_gradients_are_reduced_during_the_backward_pass_of_a_compiled_model(launch):
    report = launch("overlap_proof.py", 2)
    assert report["compile"].count("exchange") > 1
    assert report["compile"].index("exchange") < last_piece(report["compile"])
    assert "exchange" not in report["whole"][: last_piece(report["whole"])], (
        "so the order does tell a whole graph from pieces"
    )
