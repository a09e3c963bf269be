"""Run your training script with changes that make it faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from flatout.cli.commands import Command
from flatout.cli.commands.tune import names_in
from flatout.config.signature import Option, checked
from flatout.errors import ConfigError
from flatout.storage.json_io import Result


class ScriptRun(Result):
    """How the script ended."""

    changes: list[str]
    """Changes that were applied."""
    failed: dict[str, str]
    """Those that could not be applied, and why."""
    code: int
    """Exit code of the script."""

    @property
    def exit_code(self) -> int:
        """The script's own."""
        return self.code

    @property
    def notes(self) -> list[str]:
        """The changes that could not be applied."""
        return [f"{name} was not applied: {why}" for name, why in self.failed.items()]


@checked
def run(
    changes: Annotated[
        str | None,
        Option("Changes, separated by commas: `flatout list changes` shows them.", "--with"),
    ] = None,
    *,
    script: Sequence[str] = (),
) -> ScriptRun:
    """Run your training script with changes that make it faster.

    The script is not edited, and its command comes after `--`. `flatout tune -- python train.py`
    finds the changes that are worth it. Input, output, files and exit code are the script's own.

    Raises: ConfigError for an unknown change, or without a script.
    """
    from flatout.measure.attach.request import Request
    from flatout.measure.scripts.changes import CHANGES
    from flatout.measure.trial import run_command

    names = names_in(changes, CHANGES, "change")
    if not script or not names:
        raise ConfigError(
            "There is no script to run, or no change to run it with.",
            fix="Write `flatout run --with bf16,compile -- python train.py`.",
        )
    request = Request(changes=names, measures=False, to_the_end=True)
    ran = run_command(script, request)
    code = 1 if ran.code is None else ran.code if ran.code >= 0 else 128 - ran.code
    return ScriptRun(changes=list(names), failed=ran.failed, code=code)


COMMAND = Command(run, example="flatout run --with bf16,compile -- python train.py")
