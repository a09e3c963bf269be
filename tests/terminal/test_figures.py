"""How numbers, times and a model's own text are shown."""

import pytest

from flatout.terminal import amount, duration, printable


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
        (61_234, "tokens", "61.2 K tokens"),
        (12_345_678, "bytes", "12.3 MB"),
        (999, "bytes", "999 bytes"),
        (2_060_000, "", "2.1 M"),
        (3e9, "tokens", "3.0 G tokens"),
    ],
)
def test_amount(number, unit, text):
    assert amount(number, unit) == text


def test_printable_takes_terminal_commands_away():
    assert printable("a\x1b[2Jb\r\tc\né") == "a�[2Jb�\tc\né"
