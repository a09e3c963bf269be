import pytest


@pytest.mark.parametrize(("world_size", "cases"), [(2, 22), (4, 42)])
def test_layers_that_ranks_share_give_the_loss_and_gradients_of_one_process(
    launch, world_size, cases
):
    found = launch("tensor_proof.py", world_size)
    assert len(found) == cases
    assert max(found.values()) < 1e-13, found
