"""What `flatout export` returns, and the check that its directory is free. No torch."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Literal

from flatout.display import Display, amount
from flatout.errors import OutputInUse, in_shell
from flatout.models.families.export_mark import read_mark
from flatout.storage.json_io import Result
from flatout.storage.whole import sweep

Format = Literal["huggingface", "safetensors"]
DEFAULT_SHARD_MIB = 4096
"""Size of the largest file of an export. Its tensors are in memory while it is written."""


class Export(Result):
    """An exported model."""

    path: str
    """The directory."""
    format: Format
    """The format."""
    run: str
    """The run directory."""
    checkpoint: str
    """The checkpoint that was exported."""
    model_class: str | None
    """The class of transformers. Null for safetensors."""
    needs_code: bool
    """Whether transformers needs trust_remote_code=True: the class is in a file of the export."""
    files: int
    """Files in the directory."""
    bytes: int
    """Their size."""
    wall_s: float
    """Seconds that it took."""
    notes: list[str]
    """What to know about the export."""

    def display(self) -> Display:
        """Return the path, the class that loads it, what to know, and how to upload it."""
        kind = f", {self.model_class}" if self.model_class else ""
        size = f"{amount(self.bytes, 'bytes')} in {self.files} files"
        upload = f"Upload it: hf upload ORG/NAME {in_shell(self.path)}"
        headline = f"{self.path}  ({size}{kind}, {self.wall_s:.1f} s)"
        return Display(headline, notes=[*self.notes, upload])


def require_free(out: Path, *, overwrite: bool = False) -> None:
    """Check that `out` is absent, an empty directory, or with `overwrite` an earlier export.

    An export whose replacement was killed is brought back first.
    Raises: OutputInUse.
    """
    sweep(out.absolute().parent, glob.escape(out.absolute().name))
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise OutputInUse(
            f"{out} is not a directory.", fix="Choose a different one with --out DIR."
        )
    if not any(out.iterdir()):
        return
    if read_mark(out) is None:
        raise OutputInUse(
            f"{out} contains files that are not part of an export.",
            fix="Choose a different --out DIR.",
        )
    if not overwrite:
        raise OutputInUse(
            f"{out} already contains an export.",
            fix="Add --overwrite to replace it, or choose a different --out DIR.",
        )
