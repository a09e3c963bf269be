"""Text that fits the terminal."""

import os
import pty
import subprocess
import sys
import termios

import pytest

from flatout.storage.streams import columns, printable, wrapped


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
            "  omitted: 3 empty documents (first: a.txt)",
            30,
            "  omitted: 3 empty documents\n    (first: a.txt)",
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


def test_an_error_is_wrapped_on_a_narrow_terminal_and_whole_in_a_pipe():
    words = [sys.executable, "-m", "flatout", "trian", "demo"]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        termios.tcsetwinsize(theirs, (24, 40))
        subprocess.run(words, stdout=subprocess.DEVNULL, stderr=theirs, check=False)
        os.close(theirs)
        lines = terminal.read(65536).decode().splitlines()
    assert lines[1].startswith("Fix: Did you mean 'train'?")
    assert len(lines) > 4
    assert max(map(len, lines)) <= 40
    piped = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    assert " ".join(" ".join(lines).split()) == " ".join(piped.split())
    assert piped.count("\n") == 2
