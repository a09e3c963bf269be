"""flatout.json, a file of every export: what it was made from, and the checksums. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from flatout.errors import CheckpointError, in_shell
from flatout.progress import SILENT, Progress
from flatout.storage.files import sha256
from flatout.storage.json_io import JsonObject, read_model, write_json

MARK = "flatout.json"
FORMAT_VERSION = 1


class _Facts(BaseModel):
    """One file of an export."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class _Mark(BaseModel):
    """What is read from flatout.json."""

    to: str = ""
    """The format of the export."""
    files: dict[str, _Facts] = {}
    """Files by name. Empty in an export of an earlier version."""


def write_mark(folder: Path, made_from: JsonObject) -> None:
    """Write flatout.json for the files that a directory has now.

    Cost: reads every file.
    """
    files: JsonObject = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    write_json(folder / MARK, {"format_version": FORMAT_VERSION, **made_from, "files": files})


def require_as_exported(folder: Path, *, progress: Progress = SILENT) -> None:
    """Check the files of a directory against the digests in its flatout.json, if it has them.

    Missing files are not reported here: a reader rejects an export that lacks a file it needs.
    Raises: CheckpointError naming the first file that differs, or flatout.json when it is damaged.
    Cost: reads every file.
    """
    mark = folder / MARK
    if not mark.exists():
        return
    as_it_is = f"delete {in_shell(mark)} to use the files as they are."
    files = read_model(mark, _Mark, fix=f"Export the run again, or {as_it_is}").files
    present = {name: facts for name, facts in files.items() if (folder / Path(name).name).is_file()}
    total = sum(facts.bytes for facts in present.values())
    with progress.task(f"Checking {folder.name}", total=total, unit="bytes") as task:
        for name, facts in present.items():
            path = folder / Path(name).name
            if path.stat().st_size != facts.bytes or sha256(path) != facts.sha256:
                raise CheckpointError(
                    f"{path} was changed after its export, or is damaged: it does not match the "
                    f"SHA-256 in {MARK}.",
                    fix=f"Export the run again. If you changed it, {as_it_is}",
                )
            task.advance(facts.bytes)
