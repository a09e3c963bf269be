"""The command line when standard output cannot be written: full disks and closed pipes."""

import errno
import io
import os
import sys
from types import SimpleNamespace

import pytest

from flatout.cli import main as cli
from flatout.cli import parser
from flatout.cli.commands import Command
from flatout.config.registry import COMMANDS
from flatout.storage.json_io import Result

LOST = "The result could not be written to standard output: No space left on device."


class Greeting(Result):
    """A greeting."""

    words: str = "hello"
    """The text."""

    @property
    def headline(self):
        return self.words


def greet() -> Greeting:
    """Say hello."""
    return Greeting()


class OneCommand:
    """A registry of one command."""

    def __init__(self, writes_files):
        self.command = Command(greet, example="flatout greet", writes_files=writes_files)

    def names(self):
        return ["greet"]

    def describe(self, name):
        return "Say hello."

    def get(self, name):
        return self.command


class Refusing(io.StringIO):
    """Standard output that rejects every write."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("words", "writes_files", "number", "code"),
    [
        (["greet", "--json"], False, errno.ENOSPC, 1),
        (["greet", "--json"], True, errno.ENOSPC, 0),
        (["greet", "--help"], True, errno.ENOSPC, 1),
        (["--help"], True, errno.ENOSPC, 1),
        (["--version"], True, errno.ENOSPC, 1),
        (["tall", "--json"], False, errno.ENOSPC, 2),
        (["greet", "--json"], False, errno.EPIPE, 0),
    ],
)
def test_lost_output_is_a_failure_when_there_are_no_files(
    words, writes_files, number, code, monkeypatch, capsys
):
    for module in (cli, parser):
        monkeypatch.setattr(module, "COMMANDS", OneCommand(writes_files))
    monkeypatch.setattr(sys, "stdout", Refusing(number))
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert (stopped.value.code, capsys.readouterr().err.count(LOST)) == (
        code,
        number == errno.ENOSPC,
    )


def test_lost_output_keeps_the_exit_code_of_commands_that_write_files():
    assert {name for name in COMMANDS.names() if COMMANDS.get(name).writes_files} == {
        "bench",
        "convert",
        "demo",
        "export",
        "import",
        "prepare",
        "profile",
        "pull",
        "push",
        "report",
        "train",
        "tune",
    }


def test_a_result_cannot_control_the_terminal(capsys):
    hostile = Greeting(words="a\x1b[2J\r\x9b1mb\n\tc")
    cli._show(hostile, True)
    cli._show(hostile, False)
    hostile._repr_pretty_(SimpleNamespace(text=print), cycle=False)
    shown = capsys.readouterr()
    lines = ["a\ufffd[2J\ufffd\ufffd1mb", "\tc"]
    assert shown.err.splitlines() == lines
    as_json = '{"words": "a\\u001b[2J\\r\\u009b1mb\\n\\tc"}'
    assert shown.out.splitlines() == [as_json, *lines, *lines]


class Screen(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, "\x1b[1mLoss\x1b[0m  1.5 \ufffd[2J. Next: \x1b[36m`flatout train`\x1b[0m\n"),
        ({"TERM": "dumb"}, "Loss  1.5 \ufffd[2J. Next: `flatout train`\n"),
    ],
)
def test_commands_and_names_stand_out_on_a_terminal_with_colours(environment, shown, monkeypatch):
    for name, value in ({"TERM": "xterm", "COLUMNS": "80"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Screen())
    cli._show(Greeting(words="Loss  1.5 \x1b[2J. Next: `flatout train`"), False)
    assert sys.stdout.getvalue() == shown
