"""The destination of a dataset, and what may already exist there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.data.prepare.request.identity import require_same
from flatout.data.store.manifest import MANIFEST, Manifest
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, OutputInUse, in_shell
from flatout.progress import Progress


def refuse_mount(out: Path) -> None:
    """Check that `out` can be replaced by a rename, or is already a dataset.

    Raises: DataError when it is a mount point.
    """
    target = out.resolve()
    if os.path.ismount(target) and not (target / MANIFEST).is_file():
        raise DataError(
            f"{out} is a mount point: the finished dataset is renamed into place, which a mount "
            "point does not allow.",
            fix=f"Choose a directory in it: --out {in_shell(out / 'NAME')}.",
        )


def refuse_occupied(out: Path) -> None:
    """Check that `out` is absent or an empty directory.

    Raises: DataError when it is not, or is a mount point.
    """
    refuse_mount(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OutputInUse(
            f"{out} already exists and is not an empty directory.",
            fix="Choose another --out, or remove what is there.",
        )


def existing_dataset(out: Path, source: Mapping[str, Any], progress: Progress) -> Manifest | None:
    """Return the manifest of `out` when it is the dataset that `source` describes, None when empty.

    Raises: DataError when it contains anything else.
    """
    if not (out / MANIFEST).is_file():
        refuse_occupied(out)
        return None
    manifest = Dataset.open(out).manifest
    require_same(
        f"{out} contains a different dataset",
        manifest.source,
        source,
        fix="Choose another --out, or remove that directory.",
    )
    progress.say(f"{out} already contains this dataset: {manifest.tokens:,} tokens. Nothing to do.")
    return manifest
