"""Checkpoint uploads."""

import errno
import os

from case import Case, World, table

from flatout.storage.remote import folder


def with_upload(world: World) -> None:
    """Upload the checkpoints of the recipe to the directory `backup`."""
    recipe = (world.path / "my.yaml").read_text()
    world.write("my.yaml", f"{recipe}checkpoint: {{upload: 'file://{world.path}/backup'}}\n")


def with_checkpoint(world: World) -> None:
    """Put a checkpoint of runs/new into the remote copy, and nothing else."""
    with_upload(world)
    world.write("backup/new/step-3-44136fa3/manifest.json", "{}")


def with_run(world: World) -> None:
    """Put another run of that name at the upload URL."""
    with_upload(world)
    config = (world.path / "runs/first/config.yaml").read_bytes()
    world.write("backup/new/config.yaml", config)
    world.write("backup/new/step-3-44136fa3/manifest.json", "{}")


def in_runs(world: World) -> None:
    """Name the directory of all runs as the upload URL."""
    recipe = (world.path / "my.yaml").read_text()
    world.write("my.yaml", f"{recipe}checkpoint: {{upload: 'file://{world.path}/runs'}}\n")


def in_a_file(world: World) -> None:
    """Make the directory of the uploads a file, which nobody can write into."""
    with_upload(world)
    world.write("backup", "")


def full(world: World) -> None:
    """Fill the disk that receives the uploads."""
    with_upload(world)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.patch.setattr(folder, "copy_local", refuse)


CASES = [
    *table("""
a path as checkpoint.upload
    train my.yaml checkpoint.upload=/backup
    checkpoint.upload=/backup is not a URL -> file:///
a relative path in checkpoint.upload
    train my.yaml checkpoint.upload=file://backup/runs
    checkpoint.upload=file://backup/runs depends on the current directory -> file:///
a web page as checkpoint.upload
    train my.yaml checkpoint.upload=https://example.org/runs
    https://example.org/runs | read-only -> s3://
an upload URL in memory
    train my.yaml checkpoint.upload=memory://bucket/runs
    checkpoint.upload=memory://bucket/runs is in the memory of this process -> s3:// | file:///
"""),
    Case(
        "the directory of the run as its upload URL",
        "train my.yaml --run-dir runs/new",
        ("the copy would be in ", "runs/new contains the run itself"),
        ("a directory elsewhere",),
        in_runs,
    ),
    Case(
        "a file as the upload URL",
        "train my.yaml --run-dir runs/new",
        ("There is nothing at file://", "/backup/new ([Errno 20] Not a directory"),
        ("Check the URL",),
        in_a_file,
    ),
    Case(
        "an upload URL with another run of that name",
        "train my.yaml --run-dir runs/new train.seed=5",
        ("/backup/new contains a run with different settings", "train.seed: 0 -> 5"),
        ("--run-dir DIR", "a different checkpoint.upload"),
        with_run,
        progress="has no checkpoint: restoring it from file://",
    ),
    Case(
        "an upload to a full disk",
        "train my.yaml --run-dir runs/new",
        ("/backup/new", "No space left"),
        ("Free space there",),
        full,
        may_change=("runs/new",),
    ),
    *table("""
a password in checkpoint.upload
    train my.yaml checkpoint.upload=s3://me:secret@bucket/runs
    checkpoint.upload=s3://bucket/runs must not contain -> environment variables
checkpoint.compress without checkpoint.upload
    train my.yaml checkpoint.compress=zstd
    checkpoint.compress=zstd has no effect -> checkpoint.upload
"""),
    Case(
        "--resume never with a run at the upload URL",
        "train my.yaml --run-dir runs/new --resume never",
        ("/backup/new", "step 3"),
        ("--run-dir DIR", "--resume auto"),
        with_checkpoint,
    ),
    Case(
        "a remote copy without the configuration of its run",
        "train my.yaml --run-dir runs/new",
        ("/backup/new has no config.yaml",),
        ("checkpoint.upload=none",),
        with_checkpoint,
        progress="has no checkpoint: restoring it from file://",
    ),
]
