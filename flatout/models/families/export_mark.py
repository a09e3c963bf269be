"""manifest.json of an export: what it was made from, and the checksums of its files. No torch."""

from __future__ import annotations

from pathlib import Path

from flatout.errors import CheckpointError, in_shell
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject, read_json, read_model, write_json
from flatout.storage.whole import MANIFEST, Listing, entry_of, problem_of

FORMAT_VERSION = 2
CARD = "README.md"
"""The model card, which people edit."""


def write_mark(folder: Path, made_from: JsonObject) -> int:
    """Write the manifest for the files that a directory has now, and return their number with it.

    Cost: reads every file.
    """
    files = [
        entry_of(path).model_dump() for path in sorted(folder.iterdir()) if path.name != MANIFEST
    ]
    mark = {"kind": "export", "format_version": FORMAT_VERSION, **made_from, "files": files}
    write_json(folder / MANIFEST, mark)
    return len(files) + 1


def read_mark(folder: Path) -> Listing | None:
    """Return the manifest of an export, or None when a directory is none.

    Raises: CheckpointError when it is damaged.
    """
    path = folder / MANIFEST
    document = read_json(path) if path.exists() else None
    if not isinstance(document, dict) or document.get("kind") != "export":
        return None
    return read_model(path, Listing, fix=f"Export the run again, or {_as_it_is(path)}.")


def require_as_exported(folder: Path, *, progress: Progress = SILENT) -> None:
    """Check the files of an export against its manifest. Other directories pass.

    Missing files are not reported here: a reader rejects an export that lacks a file it needs.
    Raises: CheckpointError naming the first file that differs, or the manifest when it is damaged.
    Cost: reads every file.
    """
    mark = read_mark(folder)
    present = [one for one in mark.files if (folder / one.name).is_file()] if mark else []
    total = sum(entry.size_bytes for entry in present)
    with progress.task(f"Checking {folder.name}", total=total, unit="bytes") as task:
        for entry in present:
            path = folder / entry.name
            if entry.name != CARD and problem_of(path, entry):
                raise CheckpointError(
                    f"{path} was changed after its export, or is damaged: it does not match the "
                    f"checksum in {MANIFEST}.",
                    fix=f"Export the run again. If you changed it, {_as_it_is(folder / MANIFEST)}.",
                )
            task.advance(entry.size_bytes)


def _as_it_is(manifest: Path) -> str:
    return f"delete {in_shell(manifest)} to use the files as they are"
