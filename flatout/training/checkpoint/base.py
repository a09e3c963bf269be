"""The base of a LoRA checkpoint: the weights that its adapters belong to. No torch.

Such a checkpoint contains the adapters and their optimizer state only. Its index.json has one more
entry, `base`, which says where the base is, and its digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from flatout.errors import CheckpointError
from flatout.files import sha256
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Base

WEIGHTS = "model/"
"""Prefix of the weights' names in an index."""
IMPORTED = ("config.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Endings of files of another program's model."""


def digest_of(checkpoint: Path) -> str:
    """Return a digest of the weights of a checkpoint, from the digests of their files.

    The files of another program's model, which has no manifest of them, are read.

    Raises: CheckpointError when the manifest of a checkpoint is damaged.
    """
    if (checkpoint / catalog.MANIFEST).is_file():
        manifest = catalog.read_manifest(checkpoint).files
        prefix = WEIGHTS.replace("/", "-")
        files = {name: facts.sha256 for name, facts in manifest.items() if name.startswith(prefix)}
    else:
        found = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
        files = {path.name: sha256(path) for path in found if path.name.endswith(IMPORTED)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def find_base(checkpoint: Path, base: Base) -> Path:
    """Return the path of a checkpoint's base, which may have moved together with the checkpoint.

    Raises: CheckpointError when it is missing, or has other weights now.
    """
    path = Path(base.path)
    if path.exists():
        if digest_of(path) != base.digest:
            raise CheckpointError(
                f"The weights in {path} have changed since the LoRA adapters in {checkpoint} were "
                "trained on them.",
                fix="Restore them from a copy: the adapters belong to the earlier ones.",
            )
        return path
    moved = _moved_with(checkpoint, base)
    if moved is None:
        raise CheckpointError(
            f"{checkpoint} contains LoRA adapters, and the weights that they belong to, {path}, do "
            "not exist.",
            fix="Restore them there, or move both runs together.",
        )
    return moved


def _moved_with(checkpoint: Path, base: Base) -> Path | None:
    """Return the base in a directory that was renamed above both; None when it is not there.

    Each directory above the checkpoint is tried with each tail of the old path.
    """
    parts = Path(base.path).parts
    tails = [Path(*parts[start:]) for start in range(1, len(parts))]
    tried = (above / tail for above in checkpoint.resolve().parents for tail in tails)
    return next(
        (path for path in tried if path.exists() and digest_of(path) == base.digest),
        None,
    )
