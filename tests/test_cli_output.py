"""The command line where standard output takes nothing: a full disk, a reader that has left."""

import errno
import io
import os
import sys

import pytest

from flatout import cli
from flatout.commands import Command, Result
from flatout.registry import COMMANDS

LOST = "The result could not be written to standard output: No space left on device."


class Told(Result):
    """What was told."""

    words: str = "hello"
    """The words."""


def tell() -> Told:
    """Tell something."""
    return Told()


class OneCommand:
    """A registry of one command."""

    def __init__(self, writes_files):
        self.command = Command(tell, example="flatout tell", writes_files=writes_files)

    def names(self):
        return ["tell"]

    def describe(self, name):
        return "Tell something."

    def get(self, name):
        return self.command


class Refusing(io.StringIO):
    """Standard output that takes nothing."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("words", "writes_files", "number", "code"),
    [
        (["tell", "--json"], False, errno.ENOSPC, 1),
        (["tell", "--json"], True, errno.ENOSPC, 0),
        (["tell", "--help"], True, errno.ENOSPC, 1),
        (["--help"], True, errno.ENOSPC, 1),
        (["--version"], True, errno.ENOSPC, 1),
        (["tall", "--json"], False, errno.ENOSPC, 2),
        (["tell", "--json"], False, errno.EPIPE, 0),
    ],
)
def test_lost_output_fails_where_it_is_all_there_is(
    words, writes_files, number, code, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "COMMANDS", OneCommand(writes_files))
    monkeypatch.setattr(sys, "stdout", Refusing(number))
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert (stopped.value.code, capsys.readouterr().err.count(LOST)) == (
        code,
        number == errno.ENOSPC,
    )


def test_only_commands_that_write_files_keep_their_exit_code_when_output_is_lost():
    assert {name for name in COMMANDS.names() if COMMANDS.get(name).writes_files} == {
        "bench",
        "demo",
        "import",
        "prepare",
        "train",
    }
