"""A mirror of checkpoints."""

from __future__ import annotations

from case import Case, World
from fsspec.implementations.memory import MemoryFileSystem


def with_checkpoint(world: World) -> None:
    """Put a checkpoint of runs/new into the mirror, and nothing else."""
    store = MemoryFileSystem()
    store.pipe_file("/bucket/runs/new/step-3/manifest.json", b"{}")
    world.stack.callback(store.rm, "/bucket", recursive=True)


CASES = [
    Case(
        "a path as checkpoint.mirror",
        "train my.yaml checkpoint.mirror=/backup",
        ("checkpoint.mirror=/backup is not a URL",),
        ("file:///",),
    ),
    Case(
        "a relative path in checkpoint.mirror",
        "train my.yaml checkpoint.mirror=file://backup/runs",
        ("checkpoint.mirror=file://backup/runs depends on the current directory",),
        ("file:///",),
    ),
    Case(
        "a web page as checkpoint.mirror",
        "train my.yaml checkpoint.mirror=https://example.org/runs",
        ("https://example.org/runs", "read-only"),
        ("s3://",),
    ),
    Case(
        "a password in checkpoint.mirror",
        "train my.yaml checkpoint.mirror=s3://me:secret@bucket/runs",
        ("checkpoint.mirror=s3://bucket/runs must not contain",),
        ("environment variables",),
    ),
    Case(
        "checkpoint.compress without a mirror",
        "train my.yaml checkpoint.compress=zstd",
        ("checkpoint.compress=zstd has no effect",),
        ("checkpoint.mirror",),
    ),
    Case(
        "--resume never with a run in the mirror",
        "train my.yaml --run-dir runs/new --resume never checkpoint.mirror=memory://bucket/runs",
        ("memory://bucket/runs/new", "step 3"),
        ("--run-dir DIR", "--resume auto"),
        with_checkpoint,
    ),
    Case(
        "a mirror without the configuration of its run",
        "train my.yaml --run-dir runs/new checkpoint.mirror=memory://bucket/runs",
        ("memory://bucket/runs/new has no config.yaml",),
        ("checkpoint.mirror=none",),
        with_checkpoint,
        progress="has no checkpoint: restoring it from memory://bucket/runs/new",
    ),
]
