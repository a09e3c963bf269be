import pytest

pytestmark = pytest.mark.slow


def test_copies_of_split_weights_train_exactly_like_fp32_copies(launch):
    report = launch("split_weights_proof.py", 2)
    assert report["losses"] == report["plain_losses"]
    assert report["losses"][-1] < report["losses"][0]
    assert report["equal"] == 2
