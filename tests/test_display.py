"""Numbers with their units."""

import pytest

from flatout.display import age, amount, digits, duration, gib, milliseconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (2.46, "2.5 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (62, "1 min 02 s"),
        (3599.8, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "documents", "0 documents"),
        (3.25, "batches", "3.2 batches"),
        (1234, "documents", "1,234 documents"),
        (1, "documents", "1 document"),
        (1.04, "tokens", "1.0 tokens"),
        (61_234, "tokens", "61.2 K tokens"),
        (12_345_678, "bytes", "12.3 MB"),
        (999, "bytes", "999 bytes"),
        (2_060_000, "", "2.1 M"),
        (3e9, "tokens", "3.0 G tokens"),
    ],
)
def test_amount(number, unit, text):
    assert amount(number, unit) == text


def test_other_units():
    assert [age(s) for s in (8, 330, 83_000, 300_000)] == ["8 s", "5 min", "23 h", "3 d"]
    assert [milliseconds(s) for s in (0.01234, 1.234)] == ["12.3 ms", "1.23 s"]
    assert [digits(number) for number in (0.123456, 12_345.6)] == ["0.1235", "12,346"]
    assert [gib(size) for size in (0.004, 33.5)] == ["4.1 MiB", "33.50 GiB"]
