"""Text that fits the terminal."""

import os
import pty
import sys
import termios

import pytest

from flatout.streams import printable
from flatout.terminal import columns, wrapped


def test_printable_replaces_control_characters():
    assert printable("a\x1b[2Jb\r\tc\né") == "a�[2Jb�\tc\né"


@pytest.mark.parametrize(
    ("text", "width", "broken"),
    [
        ("short\n\n  short", 40, "short\n\n  short"),
        (
            "Loss       3.1 bits of text and more",
            24,
            "Loss       3.1 bits of\n           text and more",
        ),
        ("a first column, wide  of text", 24, "a first column, wide  of\n  text"),
        (
            "  left out: 3 empty documents (first: a.txt)",
            30,
            "  left out: 3 empty documents\n    (first: a.txt)",
        ),
        (
            "Saved runs/a-name-that-is-long/checkpoints/step-1",
            20,
            "Saved\n  runs/a-name-that-is-long/checkpoints/step-1",
        ),
        ("  | def f(): return 1", 14, "  | def f():\n  | return 1"),
    ],
)
def test_long_lines_are_broken_at_spaces(text, width, broken):
    assert wrapped(text, width) == broken


def test_columns_are_the_terminals_and_80_without_one(monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "wb", buffering=0), os.fdopen(theirs, "w") as terminal:
        termios.tcsetwinsize(theirs, (24, 47))
        with open(os.devnull, "w") as nothing:
            monkeypatch.setattr(sys, "stdout", nothing)
            monkeypatch.setattr(sys, "stderr", nothing)
            assert columns() == 80
            monkeypatch.setattr(sys, "stderr", terminal)
            assert columns() == 47
