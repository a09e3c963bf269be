"""A fake command for the tests of the command line."""

import contextlib
import signal
from typing import Annotated

from flatout import errors
from flatout.cli.commands import Command
from flatout.config.signature import Argument, Option
from flatout.progress import SILENT
from flatout.storage.json_io import Result


class Shout(Result):
    """What was shouted."""

    words: list[str]
    """The words."""
    loss: float = 0.5
    """A figure."""

    @property
    def headline(self) -> str:
        return " ".join(self.words).upper()


def shout(
    words: Annotated[list[str], Argument("What to shout.")],
    times: Annotated[int, Option("How often.")] = 1,
    loss: Annotated[float, Option("A figure.")] = 0.5,
    *,
    write=None,
    observers=(),
    progress=SILENT,
):
    """Shout some words.

    Raises: ConfigError when they are rude.
    """
    with progress.task("Shouting"):
        progress.say("taking a breath")
    if write:
        write("streamed\n")
    if words[0] == "interrupt":
        raise KeyboardInterrupt
    if words[0] in {"terminate", "usr1"}:
        with contextlib.suppress(Exception):  # code that handles errors does not see the signal
            signal.raise_signal(signal.SIGTERM if words[0] == "terminate" else signal.SIGUSR1)
    if words[0] == "crash":
        _ = 1 / 0
    if words[0] == "interrupted":
        raise errors.Interrupted("Stopped.", fix="Again.", signal_number=15)
    if hasattr(errors, words[0]):
        error = getattr(errors, words[0])("It went wrong.", fix="Do it right.")
        for word in words[1:]:
            error.add_note(word)
        raise error
    return Shout(words=words * times, loss=loss)


class Fakes:
    """A registry of one command."""

    def names(self):
        return ["shout"]

    def describe(self, name):
        return "Shout some words."

    def get(self, name):
        return Command(shout, example="flatout shout hello --times 2")
