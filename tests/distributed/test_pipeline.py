import pytest


@pytest.mark.quick_cases("2-6")
@pytest.mark.parametrize(("world_size", "cases"), [(2, 6), (4, 24)])
def test_blocks_on_several_ranks_give_the_loss_and_gradients_of_one_process(
    launch, world_size, cases
):
    found = launch("pipeline_proof.py", world_size)
    assert len(found) == cases
    assert max(found.values()) < 1e-13, found
