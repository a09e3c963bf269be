"""Compare the speed and the losses of two training commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from flatout.cli.commands import Command
from flatout.config.signature import Option, checked
from flatout.errors import ConfigError
from flatout.measure.compare import Comparison, compare_commands
from flatout.progress import SILENT, Progress


@checked
def compare(
    against: Annotated[
        str | None,
        Option("Compare the command in another revision of its git repository, such as main."),
    ] = None,
    at_least: Annotated[
        float | None,
        Option("Exit with 3 if the second command is surely less than this times as fast.", min=0),
    ] = None,
    work: Annotated[
        float,
        Option("Work of the second command's steps, such as 2 for twice the batch.", min=1e-9),
    ] = 1.0,
    minutes: Annotated[float, Option("Time limit.", min=0.1)] = 5.0,
    *,
    script: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Comparison:
    """Compare the speed and the losses of two training commands.

    Both come after `--`: `flatout compare -- python train.py -- python train.py --compile`. They
    take turns, each in its own process and in a copy of this directory, until it is decided. Nobody
    edits a script. With `--against`, one command is compared with itself in another revision of the
    repository, whose code is executed: `flatout compare --against main -- python train.py`. As a
    gate in CI, `--at-least 0.95` fails when the second command is more than 5% slower.

    Exit codes: 3 if the second command is slower than `--at-least`.

    Raises: ConfigError when the commands are the same, or there is no such revision; RunFailed when
            a command fails.

    In Python, `script` are the words of both commands, with `--` between them.
    """
    words = [*script, "--"]
    at = words.index("--")
    one, other = words[:at], words[at + 1 : -1]
    if not one or (not other and against is None):
        raise ConfigError(
            "There are no two commands to compare.",
            fix=f"Write `{COMMAND.example}`, or with --against REVISION a single one.",
        )
    if other and against is not None:
        raise ConfigError(
            "--against compares one command with itself in another revision.",
            fix="Give one command after --, or remove --against.",
        )
    return compare_commands(
        one,
        other,
        against=against,
        at_least=at_least,
        work=work,
        minutes=minutes,
        progress=progress,
    )


COMMAND = Command(
    compare,
    example="flatout compare -- python train.py -- python train.py --compile",
)
