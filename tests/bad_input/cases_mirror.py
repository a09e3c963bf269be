"""A mirror of checkpoints."""

from __future__ import annotations

import errno
import json
import os

from case import Case, World, table
from fsspec.implementations.local import LocalFileSystem


def with_mirror(world: World) -> None:
    """Give the recipe a mirror in the directory `mirror`."""
    recipe = (world.path / "my.yaml").read_text()
    world.write("my.yaml", f"{recipe}checkpoint: {{mirror: 'file://{world.path}/mirror'}}\n")


def with_checkpoint(world: World) -> None:
    """Put a checkpoint of runs/new into the mirror, and nothing else."""
    with_mirror(world)
    world.write("mirror/new/step-3/manifest.json", "{}")


def with_run(world: World) -> None:
    """Put another run of that name into the mirror."""
    with_mirror(world)
    for path in ("config.yaml", "config.copy.yaml", "asked.yaml"):
        world.write(f"mirror/new/{path}", (world.path / "runs/first" / path).read_bytes())
    world.write("mirror/new/step-3/manifest.json", "{}")


def in_runs(world: World) -> None:
    """Name the directory of all runs as the mirror."""
    recipe = (world.path / "my.yaml").read_text()
    world.write("my.yaml", f"{recipe}checkpoint: {{mirror: 'file://{world.path}/runs'}}\n")


def in_a_file(world: World) -> None:
    """Make the directory of the mirror a file, which nobody can write into."""
    with_mirror(world)
    world.write("mirror", "")


def without_asked(world: World) -> None:
    """Put another run of that name into the mirror, without the settings as requested."""
    with_run(world)
    (world.path / "mirror/new/asked.yaml").unlink()


def full(world: World) -> None:
    """Fill the disk of the mirror."""
    with_mirror(world)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.patch.setattr(LocalFileSystem, "put_file", refuse)


def taken_over(world: World) -> None:
    """Let the run continue on another machine, which restored it from the mirror."""
    with_mirror(world)
    (world.path / "runs/first/summary.json").unlink()
    own = {"id": "own", "url": f"file://{world.path}/mirror/first"}
    world.write("runs/first/mirror.json", json.dumps(own))
    other = {"id": "other", "run": "/data/first", "host": "nodeB"}
    world.write("mirror/first/mirror.json", json.dumps(other))


CASES = [
    *table("""
a path as checkpoint.mirror
    train my.yaml checkpoint.mirror=/backup
    checkpoint.mirror=/backup is not a URL -> file:///
a relative path in checkpoint.mirror
    train my.yaml checkpoint.mirror=file://backup/runs
    checkpoint.mirror=file://backup/runs depends on the current directory -> file:///
a web page as checkpoint.mirror
    train my.yaml checkpoint.mirror=https://example.org/runs
    https://example.org/runs | read-only -> s3://
a mirror in memory
    train my.yaml checkpoint.mirror=memory://bucket/runs
    checkpoint.mirror=memory://bucket/runs is in the memory of this process -> s3:// | file:///
"""),
    Case(
        "the directory of the run as its mirror",
        "train my.yaml --run-dir runs/new",
        ("the mirror would be ", "runs/new contains the run itself"),
        ("a directory elsewhere",),
        in_runs,
    ),
    Case(
        "a file as the mirror",
        "train my.yaml --run-dir runs/new",
        ("Cannot read file://", "/mirror/new: [Errno 20] Not a directory"),
        ("a part of that path is a file",),
        in_a_file,
    ),
    Case(
        "a mirror with another run of that name",
        "train my.yaml --run-dir runs/new train.seed=5",
        ("/mirror/new contains a run with different settings", "train.seed: 0 -> 5"),
        ("--run-dir DIR", "a different checkpoint.mirror"),
        with_run,
        progress="has no checkpoint: restoring it from file://",
    ),
    Case(
        "a mirror without the settings of its run as requested",
        "train my.yaml --run-dir runs/new train.seed=5",
        ("train.seed: 0 -> 5", "/mirror/new/asked.yaml", "is missing"),
        ("Restore file://", "/mirror/new/asked.yaml"),
        without_asked,
        progress="has no checkpoint: restoring it from file://",
    ),
    Case(
        "a mirror on a full disk",
        "train my.yaml --run-dir runs/new",
        ("/mirror/new", "its disk is full"),
        ("Free space there",),
        full,
        may_change=("runs/new",),
    ),
    Case(
        "a mirror from which another machine restored the run",
        "train my.yaml --run-dir runs/first",
        ("/mirror/first", "continues as /data/first on nodeB"),
        ("Continue it there", "checkpoint.mirror=none"),
        taken_over,
    ),
    *table("""
a password in checkpoint.mirror
    train my.yaml checkpoint.mirror=s3://me:secret@bucket/runs
    checkpoint.mirror=s3://bucket/runs must not contain -> environment variables
checkpoint.compress without a mirror
    train my.yaml checkpoint.compress=zstd
    checkpoint.compress=zstd has no effect -> checkpoint.mirror
"""),
    Case(
        "--resume never with a run in the mirror",
        "train my.yaml --run-dir runs/new --resume never",
        ("/mirror/new", "step 3"),
        ("--run-dir DIR", "--resume auto"),
        with_checkpoint,
    ),
    Case(
        "a mirror without the configuration of its run",
        "train my.yaml --run-dir runs/new",
        ("/mirror/new has no config.yaml",),
        ("checkpoint.mirror=none",),
        with_checkpoint,
        progress="has no checkpoint: restoring it from file://",
    ),
]
