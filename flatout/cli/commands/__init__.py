"""One file per command: typed arguments, a call, a typed result.

A command's function is the Python API and the command line in one. Parameters annotated with
`Argument` or `Option` form the command line. The others (`progress`, `observers`) exist in Python
only, and `cli/main.py` fills them in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flatout.config.schema import RunConfig
from flatout.config.signature import Argument, Option
from flatout.storage.json_io import Result

__all__ = [
    "CheckpointName",
    "Command",
    "EndOfText",
    "ModelName",
    "Overrides",
    "Pattern",
    "RecipeName",
    "RunName",
    "TrustCode",
]


RecipeName = Annotated[str | Path | RunConfig, Argument("A recipe's name, or a YAML file.")]
Overrides = Annotated[
    list[str] | str | None, Argument("section.key=value, which overrides the recipe.")
]
RunName = Annotated[
    str | Path | None,
    Argument("A run directory, or its name under runs/ (default: the newest run there)."),
]
ModelName = Annotated[
    str | Path | None,
    Argument(
        "A run directory, or its name under runs/ (default: the newest run there). Also an "
        "export, or any model that train.init_from reads."
    ),
]
CheckpointName = Annotated[
    str | None,
    Option("best, last, or a step (default: best, or last where the best was not saved)."),
]
TrustCode = Annotated[
    bool,
    Option(
        "Allow a run from a different machine to import the code that it names, once (SECURITY.md)."
    ),
]
Pattern = Annotated[
    str | None,
    Option("Regular expression that splits text, for an unknown .tiktoken file."),
]
EndOfText = Annotated[
    str | None,
    Option(
        "End-of-text token of a tokenizer.json (default: the eos_token that a file beside "
        "it states, or else a usual one)."
    ),
]


@dataclass(frozen=True)
class Command:
    """One command of the command line. Its file here defines it as `COMMAND`."""

    call: Callable[..., Result]
    """The function. The first line of its docstring is the command's help."""
    example: str
    """A command line that shows its use, such as `flatout prepare book.txt --out data/book`."""
    processes: Callable[..., int] | None = None
    """Returns how many processes of this machine run the call. The command line starts them.

    It receives those of the command's values that match its parameters.
    """
    writes_files: bool = False
    """Whether the command writes its result to files.

    If not, the result exists on standard output only, and failing to write it is exit code 1.
    """
