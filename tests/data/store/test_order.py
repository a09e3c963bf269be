import numpy as np
import pytest

from flatout.data.store.order import shuffled


def epoch(number, num_sequences, seed=0):
    return shuffled(np.arange(num_sequences) + number * num_sequences, num_sequences, seed=seed)


@pytest.mark.slow
def test_every_epoch_is_a_permutation_for_small_sizes():
    for num_sequences in range(1, 201):
        for number in (0, 1, 17):
            assert np.array_equal(
                np.sort(epoch(number, num_sequences)), np.arange(num_sequences)
            ), num_sequences


@pytest.mark.parametrize("num_sequences", [1009, 4096, 4097, 65_535, 65_536, 65_537, 99_991])
def test_every_epoch_is_a_permutation_for_larger_sizes(num_sequences):
    assert np.array_equal(np.sort(epoch(3, num_sequences, seed=5)), np.arange(num_sequences))


@pytest.mark.parametrize("num_sequences", [1_000_000_007, 2_147_483_647, 1_099_511_627_791])
def test_large_primes_stay_in_range_without_collisions(num_sequences):
    rng = np.random.default_rng(0)
    positions = np.unique(rng.integers(0, num_sequences, 200_000))
    windows = shuffled(positions, num_sequences, seed=1)
    assert windows.min() >= 0
    assert windows.max() < num_sequences
    assert len(np.unique(windows)) == len(positions)


def test_epochs_and_seeds_differ():
    orders = [
        tuple(epoch(number, 1000, seed).tolist())
        for number in range(5)
        for seed in (0, 1, 2, 2**40, 2**63)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(1000)) not in orders


@pytest.mark.slow
@pytest.mark.parametrize("num_sequences", [7, 12, 100])
def test_every_sequence_is_equally_likely_at_every_position(num_sequences):
    epochs = 20_000
    table = shuffled(np.arange(num_sequences * epochs), num_sequences, seed=0).reshape(
        epochs, num_sequences
    )
    counts = np.stack(
        [np.bincount(table[:, place], minlength=num_sequences) for place in range(num_sequences)]
    )
    expected = epochs / num_sequences
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), (num_sequences - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_in_the_order_are_not_neighbours_in_the_text():
    num_sequences = 100_003
    windows = epoch(0, num_sequences)
    steps = np.diff(windows) % num_sequences
    assert (steps == 1).mean() < 5 / num_sequences * 2
    assert abs(np.corrcoef(windows[:-1], windows[1:])[0, 1]) < 0.02


def test_the_order_never_changes_silently():
    assert shuffled(np.arange(12), 10, seed=0).tolist() == [1, 6, 5, 9, 0, 7, 2, 4, 3, 8, 2, 6]
    assert shuffled(np.arange(10**9, 10**9 + 4), 10**9 + 7, seed=3).tolist() == [
        897301123,
        653655384,
        383652067,
        372728842,
    ]
    assert shuffled(np.arange(6), 3, seed=2**63).tolist() == [2, 0, 1, 1, 0, 2]
    assert shuffled(np.arange(3) + 5 * 97, 97, seed=1234).tolist() == [61, 64, 70]


def test_no_positions_and_one_sequence():
    assert shuffled(np.array([], np.int64), 10, seed=0).tolist() == []
    assert shuffled(np.arange(5), 1, seed=0).tolist() == [0] * 5
