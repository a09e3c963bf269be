"""Text that changes while it is being prepared: a dataset never mixes two versions of it."""

import os
from contextlib import contextmanager

import pytest
from prepared import write_rows

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.plan.work_dir import WorkPart
from flatout.data.prepare.workers.local import LocalWorkers
from flatout.data.sources import listing
from flatout.errors import DataError
from flatout.storage.remote.connection import Unreachable

OPTIONS = Options(tokenizer="byte")


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        texts = (f"{name} row {number}" for number in range(50))
        write_rows(tmp_path / "text" / f"{name}.jsonl", texts)
    return tmp_path / "text" / "b.jsonl"


def rewrite(path):
    path.write_text(path.read_text().replace("row 7", "row X"))


def once_packed(change):
    """Return an engine that calls `change` when all ranges are packed: reading has ended."""

    class Changing(LocalWorkers):
        def pack(self, *arguments):
            made = list(super().pack(*arguments))
            change()
            yield from made

    @contextmanager
    def engine(request, workers):
        yield Changing(1)

    return engine


@pytest.mark.parametrize("change", [rewrite, os.remove])
def test_a_file_that_changes_during_prepare_is_named_and_its_work_discarded(change, rows, tmp_path):
    with pytest.raises(
        DataError, match=r"b\.jsonl was changed or deleted while it was being prepared"
    ):
        prepare_dataset(
            [str(rows.parent)], tmp_path / "out", OPTIONS, engine=once_packed(lambda: change(rows))
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


@pytest.mark.parametrize(
    "touch",
    [lambda path: path.chmod(0o600), lambda path: os.link(path, path.parent.parent / "link")],
    ids=["mode", "link"],
)
def test_a_touched_file_counts_as_unchanged(touch, rows, tmp_path):
    prepare_dataset(
        [str(rows.parent)], tmp_path / "out", OPTIONS, engine=once_packed(lambda: touch(rows))
    )
    assert (tmp_path / "out" / "manifest.json").exists()


def test_changed_validation_text_is_detected(rows, tmp_path):
    options = Options(tokenizer="byte", val=(str(rows),))
    with pytest.raises(DataError, match=r"b\.jsonl was changed"):
        prepare_dataset(
            [str(rows.with_name("a.jsonl"))],
            tmp_path / "out",
            options,
            engine=once_packed(lambda: rewrite(rows)),
        )


def test_a_part_repacks_text_that_changed(rows, tmp_path, monkeypatch):
    pack = LocalWorkers.pack

    def changing(self, *arguments):
        made = list(pack(self, *arguments))
        rewrite(rows)
        return iter(made)

    text, before = rows.read_text(), rows.stat()
    with monkeypatch.context() as patch:
        patch.setattr(LocalWorkers, "pack", changing)
        with pytest.raises(DataError, match=r"b\.jsonl was changed"):
            prepare_dataset([str(rows.parent)], tmp_path / "out", OPTIONS, part=WorkPart(1, 1))
    rows.write_text(text)
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="1 of 1 ranges"):
        prepare_dataset([str(rows.parent)], tmp_path / "out", OPTIONS, join=True)


def test_a_remote_file_that_changes_during_prepare_is_named(rows, store, tmp_path):
    address = "faulty://bucket/text"
    store.put_file(str(rows), f"{address}/rows.jsonl")
    engine = once_packed(
        lambda: store.pipe_file(
            f"{address}/rows.jsonl", rows.read_bytes().replace(b"row 7", b"row X")
        )
    )
    with pytest.raises(DataError, match=r"text/rows\.jsonl was changed"):
        prepare_dataset([address], tmp_path / "out", OPTIONS, engine=engine)
    prepare_dataset([address], tmp_path / "out", OPTIONS)


def test_an_unreachable_store_at_the_end_keeps_finished_ranges(rows, store, tmp_path, monkeypatch):
    def unreachable(*_):
        raise Unreachable("no route.", fix="Wait.")

    address = "faulty://bucket/text"
    store.put_file(str(rows), f"{address}/rows.jsonl")
    with monkeypatch.context() as patch:
        engine = once_packed(lambda: patch.setattr(listing, "find_remote", unreachable))
        with pytest.raises(Unreachable):
            prepare_dataset([address], tmp_path / "out", OPTIONS, engine=engine)
    assert len(list((tmp_path / ".out.part").rglob("ranges/*.json"))) == 1
    prepare_dataset([address], tmp_path / "out", OPTIONS)
