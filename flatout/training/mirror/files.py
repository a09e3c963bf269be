"""Files of a checkpoint while it is sent: they stay when it is deleted, and may be compressed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.sources.packed import import_package
from flatout.training.mirror.remote import COMPRESSED


@contextmanager
def pinned(checkpoint: Path) -> Iterator[tuple[Path | None, Path]]:
    """Yield a directory with a checkpoint's files, and one for temporary files.

    The former has hard links, so that deleting the checkpoint does not end its upload; where the
    file system has none, it is the checkpoint itself. It is None when the checkpoint is gone.
    """
    work = checkpoint.with_name(f"{checkpoint.name}.tmp-upload-{secrets.token_hex(4)}")
    links = work / "files"
    links.mkdir(parents=True)
    try:
        source: Path | None = links
        try:
            for path in checkpoint.iterdir():
                os.link(path, links / path.name)
        except FileNotFoundError:
            source = None
        except OSError:
            source = checkpoint
        yield source, work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def compressed(path: Path, work: Path) -> Path:
    """Return a compressed copy of a file, in the directory `work`."""
    zstandard: Any = import_package("zstandard", str(path), extra="zstd")
    copy = work / f"{path.name}{COMPRESSED}"
    with path.open("rb") as source, copy.open("wb") as target:
        zstandard.ZstdCompressor().copy_stream(source, target, size=path.stat().st_size)
    return copy
