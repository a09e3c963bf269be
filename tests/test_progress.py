"""Numbers in messages."""

from flatout.progress import counted


def test_a_count_of_one_is_singular():
    assert [counted(n, "row") for n in (0, 1, 4)] == ["0 rows", "1 row", "4 rows"]
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"
