"""Imports hand-made token files, and reads the dataset back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flatout.data.prepare.import_tokens import ImportOptions, import_tokens
from flatout.data.store.manifest import Manifest
from flatout.data.store.shards import Dataset
from flatout.data.store.verify import verify_dataset
from flatout.progress import SILENT


@dataclass(frozen=True)
class Imported:
    """A dataset that was imported."""

    manifest: Manifest
    train: list[int]
    train_ends: list[int]
    val: list[int]
    val_ends: list[int]
    said: str
    existed: bool


class Heard:
    """A progress that records its messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def task(self, what, **_):
        return SILENT.task(what)

    def say(self, line):
        self.lines.append(line)


@pytest.fixture
def imported(tmp_path):
    """Import a path with the options of the command, and return what the dataset contains."""

    def bring_in(path, *, out="out", **options):
        heard = Heard()
        options = ImportOptions(**{"tokenizer": "byte", **options})
        made = import_tokens(path, tmp_path / out, options, progress=heard)
        dataset = Dataset.open(tmp_path / out)
        assert verify_dataset(tmp_path / out).problems == ()
        splits = [dataset.split(name) for name in ("train", "val")]
        found = [
            values
            for split in splits
            for values in (
                split.read_tokens(0, split.num_tokens).tolist(),
                split.document_ends.tolist(),
            )
        ]
        return Imported(made.manifest, *found, " ".join(heard.lines), made.existed)

    return bring_in


@pytest.fixture
def nothing_kept(tmp_path):
    """Check after the test that neither a dataset nor a work directory is left."""
    yield
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.part").exists()
