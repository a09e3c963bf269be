"""Numbers in messages."""

import pytest

from flatout.progress import counted, readable_memory


def test_a_count_of_one_is_singular():
    assert [counted(n, "row") for n in (0, 1, 4)] == ["0 rows", "1 row", "4 rows"]
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 KiB"),
        (2000, "2.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (2**30 // 4, "0.2 GiB"),
        (91 << 30, "91.0 GiB"),
    ],
)
def test_little_memory_is_not_zero(num_bytes, text):
    assert readable_memory(num_bytes) == text
