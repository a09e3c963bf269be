import pytest


@pytest.mark.quick_cases("2")
@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_that_ranks_share_give_the_loss_and_gradients_of_one_process(launch, world_size):
    found = launch("context_proof.py", world_size)
    assert len(found) == 12
    assert max(found.values()) < 1e-11, found
