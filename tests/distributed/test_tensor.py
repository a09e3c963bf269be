import pytest


@pytest.mark.quick_cases("2-20")
@pytest.mark.parametrize(("world_size", "cases"), [(2, 20), (4, 38)])
def test_layers_that_ranks_share_give_the_loss_and_gradients_of_one_process(
    launch, world_size, cases
):
    found = launch("tensor_proof.py", world_size)
    assert len(found) == cases
    assert max(found.values()) < 1e-13, found


def test_what_one_layout_saves_every_other_one_loads(launch):
    found = launch("layout_proof.py", 4)
    assert len(found) == 3 * 5 * 5
    assert all(found.values()), found
