"""One file a command: typed arguments, a call, a typed result.

A command's function is the Python API as well as the command line. Parameters annotated with
`typer.Argument` or `typer.Option` are the command line, where a word becomes the first type of
several (`Path | str`: a path, which Python may give as text); the others (`progress`, `observers`)
exist in Python, and `cli.py` fills them in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict

__all__ = ["TRUST_CODE", "Command", "Result"]

TRUST_CODE: Any = typer.Option(
    "--trust-code",
    help="Import the code of its own that a run from elsewhere names, and remember that it may (SECURITY.md).",
)
"""The option of every command that opens a run."""


class Result(BaseModel):
    """What a command returns: its fields are those of `--json`, its `summary` is what a person
    reads at the end.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    def summary(self) -> str:
        """Return the closing lines for a person, as plain text; a line a field when a command says
        nothing better.
        """
        fields = self.model_dump(mode="json")
        width = max((len(name) for name in fields), default=0)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in fields.items())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show a notebook, and IPython, what a person reads at the end."""
        printer.text(self.summary() or repr(self))

    @property
    def exit_code(self) -> int:
        """The program's exit code once the result is printed: 0, unless a command says otherwise."""
        return 0


@dataclass(frozen=True)
class Command:
    """One command of the program, found in its file of `flatout/commands` as `COMMAND`."""

    call: Callable[..., Result]
    """The function; its first docstring line is the command's help."""
    example: str
    """One command line that shows its use, for example `flatout prepare book.txt --out data/book`.
    """
    check: Callable[..., object] | None = None
    """Called first by the command line, with what it takes of the values and `progress`, and
    without torch: simple mistakes are answered at once.
    """
    needs_torch: bool = False
    """Whether calling it imports torch; the command line then says so, because that takes seconds.
    """
    writes_files: bool = False
    """Whether its result is in files. If not, its output is all of it: where that cannot be
    written, the command line exits with 1.
    """
