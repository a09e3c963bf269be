"""The directory of an export: free before, complete or absent after. No torch."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flatout.errors import OutputInUse
from flatout.export_mark import MARK
from flatout.files import PART, sync


def require_free(out: Path, *, overwrite: bool = False) -> None:
    """Check that `out` is absent, an empty directory, or with `overwrite` an earlier export.

    Raises: OutputInUse.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise OutputInUse(f"{out} is not a directory.", fix="Choose another one with --out DIR.")
    if not any(out.iterdir()):
        return
    if not (out / MARK).is_file():
        raise OutputInUse(
            f"{out} has files that are not of an export.", fix="Choose another --out DIR."
        )
    if not overwrite:
        raise OutputInUse(
            f"{out} has an export already.",
            fix="Add --overwrite to replace it, or choose another --out DIR.",
        )


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a new directory beside `out`, which takes its name when the block has succeeded.

    After an error it is deleted, and an earlier export stays as it was.
    """
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (
        parent / f"{out.name}.{secrets.token_hex(4)}{suffix}" for suffix in (PART, ".old")
    )
    temporary.mkdir()
    try:
        yield temporary
        sync(temporary)
        if out.exists():
            out.rename(old)
        temporary.rename(out)
        sync(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
