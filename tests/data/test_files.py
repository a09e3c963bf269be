import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from flatout.data.prepare.pack.tokenize import Packing, pack_range
from flatout.data.prepare.pack.work_items import ALL_VAL, WorkItem
from flatout.data.prepare.request.options import Options
from flatout.data.sources import ReadTask
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import CheckpointError, DataError
from flatout.storage import files, json_io
from flatout.training.checkpoint.catalog import make_folder


@pytest.fixture
def done(monkeypatch):
    """Record every sync, rename and unlink in order, with the final name of the file."""
    told = []
    fsync, replace, rename, unlink = os.fsync, Path.replace, Path.rename, Path.unlink

    def tell(what, path):
        told.append((what, re.sub(r"\.[0-9a-f]{8}\.part$", "", Path(path).name)))

    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: (
            tell("sync", os.readlink(f"/proc/self/fd/{descriptor}")) or fsync(descriptor)
        ),
    )
    monkeypatch.setattr(
        Path, "replace", lambda path, target: tell("rename", target) or replace(path, target)
    )
    monkeypatch.setattr(
        Path, "rename", lambda path, target: tell("rename", target) or rename(path, target)
    )
    monkeypatch.setattr(
        Path, "unlink", lambda path, **options: tell("unlink", path) or unlink(path, **options)
    )
    return told


def in_order(done, *wanted):
    """Return whether these operations were done, in this order."""
    left = iter(done)
    return all(item in left for item in wanted)


@pytest.mark.parametrize("write", [files.write_whole, files.write_text])
def test_a_failed_write_keeps_the_old_content(tmp_path, monkeypatch, write):
    write(tmp_path / "f", "old")
    write(tmp_path / "f", "new")
    monkeypatch.setattr(
        files, "sync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "f", "newer")
    assert (tmp_path / "f").read_text() == "new"


def test_the_names_of_new_directories_are_synced(tmp_path, done):
    make_folder(tmp_path / "a" / "b")
    assert sorted(done) == sorted([("sync", "a"), ("sync", tmp_path.name)])
    make_folder(tmp_path / "a" / "b")
    assert len(done) == 2


def test_write_text_syncs_the_directory_and_write_whole_does_not(tmp_path, done):
    files.write_whole(tmp_path / "f", "text")
    assert done == [("sync", "f"), ("rename", "f")]
    files.write_text(tmp_path / "f", "text")
    assert done[2:] == [*done[:2], ("sync", tmp_path.name)]


def test_the_files_of_a_range_are_synced_before_its_record(tmp_path, done):
    for name in ("ranges", "dataset"):
        (tmp_path / name).mkdir()
    task = ReadTask(lambda: ["a text"], (), "one")
    item = WorkItem(number=3, num_tasks=1, first=0, assignment=ALL_VAL, read_tasks=(task,))
    pack_range(item, Packing(make_tokenizer("byte", lambda _: ()), Options(), tmp_path))()
    folder = ("sync", "dataset")
    record = [("sync", "000003.json"), ("rename", "000003.json")]
    for name in ("00003.bin", "00003.ends.bin"):
        assert in_order(done, ("sync", name), ("rename", name), folder, *record)
    assert done.count(folder) == 1, (
        "a record that a power cut takes costs its range again, not more"
    )


def test_a_dataset_is_synced_before_it_is_renamed(tmp_path, done, write_set):
    write_set(np.arange(10))
    manifest = [("sync", "manifest.json"), ("rename", "manifest.json"), ("sync", "dataset")]
    assert in_order(
        done, ("sync", "tokenizer.json"), *manifest, ("rename", "set"), ("sync", tmp_path.name)
    )


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "Free space there"),
        (errno.EIO, "failed to read or write"),
        (errno.EACCES, "can be written"),
    ],
)
def test_the_fix_of_a_failed_write_depends_on_the_error(number, fix):
    with pytest.raises(DataError, match=fix) as refused, files.writing("out"):
        raise OSError(number, os.strerror(number))
    assert ("Free space there" in refused.value.fix) == (number == errno.ENOSPC)


def test_reading_the_tail_of_a_file_skips_the_line_it_cuts(tmp_path):
    path = tmp_path / "lines"
    for number in range(100):
        json_io.append_line(path, {"n": number})
    tail = [line["n"] for line in json_io.LineReader(path, tail_bytes=50).read()]
    assert tail == list(range(tail[0], 100))
    assert 0 < len(tail) < 10


def test_a_line_after_an_unfinished_one_is_separate(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"n": 1}\n{"n":')
    json_io.append_line(path, {"n": 2})
    json_io.append_line(path, {"n": 3})
    assert [line["n"] for line in json_io.LineReader(path).read()] == [1, 2, 3]
    assert list(json_io.LineReader(tmp_path / "none").read()) == []


@pytest.mark.parametrize("value", [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0])
def test_floats_read_back_bit_for_bit(tmp_path, value):
    json_io.write_json(tmp_path / "f", {"x": value})
    assert json_io.read_json(tmp_path / "f")["x"].hex() == value.hex()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"Cannot read .*/f: No such file"):
        json_io.read_json(tmp_path / "f")


def test_the_size_of_a_directory_is_that_of_its_files(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(bytes(10))
    (tmp_path / "a" / "b" / "y").write_bytes(bytes(7))
    assert files.folder_bytes(tmp_path) == 17
    assert files.folder_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "Free space"),
        (errno.EFBIG, "A file may not be that large here: raise `ulimit -f`"),
        (errno.ENOENT, "Do not move the run directory"),
        (errno.EIO, "The disk failed to read or write"),
    ],
)
def test_the_fix_in_a_run_directory_depends_on_the_error(number, fix):
    assert files.disk_fix(OSError(number, "")).startswith(fix)
