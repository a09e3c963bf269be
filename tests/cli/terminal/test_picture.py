"""The loss curve: its shape, its labels, and the characters it uses."""

import math

import pytest

from flatout.cli.terminal import curve
from flatout.cli.terminal.picture import sparkline


def falling(n=200):
    return [(i, 2 + 6 * math.exp(-i / 40)) for i in range(n)]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_shape_and_labels(encoding):
    lines = curve(falling(), width=40, height=6, encoding=encoding).split("\n")
    assert len(lines) == 6 + 2
    assert all(len(line) <= 10 + 40 for line in lines)
    assert lines[0].lstrip().startswith("8.000")
    assert lines[5].lstrip().startswith(f"{falling()[-1][1]:.3f}")
    assert lines[7].split()[0] == "0"
    assert lines[7].split()[-1] == "199"


def test_ascii_uses_ascii_only():
    assert curve(falling(), marks=[(100, 3.0)], encoding="ascii").isascii()
    assert not curve(falling(), encoding="utf-8").isascii()
    assert curve(falling(), encoding="no-such-encoding").isascii()


def rows_of(points, **options):
    picture = curve(points, encoding="ascii", **options)
    return [line[10:] for line in picture.split("\n")[: options["height"]]]


def test_a_falling_loss_falls():
    rows = rows_of(falling(), width=40, height=6)
    drawn = {
        column: row for row, text in enumerate(rows) for column, c in enumerate(text) if c == "*"
    }
    lowest = [drawn[column] for column in sorted(drawn)]
    assert len(lowest) == 40
    assert lowest == sorted(lowest)
    assert lowest[-1] == 5


def test_marks_are_drawn_at_their_value():
    marks = [(0, 0.0), (100, 4.0)]
    rows = rows_of([(0, 4.0), (100, 0.0)], marks=marks, width=21, height=5)
    assert (rows[0][20], rows[4][0]) == ("o", "o")


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, math.nan), (2, math.inf), (3, 1.0)]])
def test_too_few_points_give_no_picture(points):
    assert curve(points) == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_flat_curves_and_missing_values_do_not_fail(encoding):
    assert curve([(5, 1.0), (5, 1.0)], encoding=encoding)
    assert curve([(1, 2.0), (2, math.nan), (9, 2.0)], encoding=encoding).count("\n") == 9


@pytest.mark.parametrize("width", [8, 20, 29, 40, 60])
def test_a_narrow_picture_has_a_short_title(width):
    lines = curve([(0, 2.0), (2000, 1.0)], marks=[(1000, 1.5)], width=width).splitlines()
    assert max(map(len, lines)) <= width + 10
    assert "loss" in lines[-1] or width == 8


def test_a_sparkline_shows_the_means_of_its_shares():
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline(range(8), 8) == sparkline(range(8), 80) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0], 5) == "▁▁"
    assert sparkline([1.0], 5) == sparkline(range(8), 8, encoding="ascii") == ""
