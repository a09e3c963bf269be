"""A run does not write through links: an untrusted run directory cannot change other files."""

import os

import pytest

from flatout.cli.commands.runs import runs
from flatout.config.documents import read_document
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.store.manifest import read_manifest
from flatout.errors import CheckpointError, DataError, FlatoutError
from flatout.storage import json_io
from flatout.storage.json_io import append_line
from flatout.training.run import run_training
from flatout.training.run_dir import layout, lock
from flatout.training.run_dir.lock import hold_lock, is_locked
from flatout.training.run_dir.runlog import Lines

pytestmark = pytest.mark.slow

ORIGINAL = "the original content\n"


@pytest.mark.parametrize("name", layout.WRITTEN)
def test_a_run_rejects_a_link_among_its_files(name, tiny_config, tmp_path):
    run, target = tmp_path / "run", tmp_path / "elsewhere"
    run_training(tiny_config(train__steps=2), run)
    if (run / name).is_dir():
        (run / name).rename(target)
    else:
        (run / name).unlink(missing_ok=True)
        target.write_text(ORIGINAL)
    (run / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=f"{name} is a symbolic link to .*elsewhere"):
        run_training(tiny_config(train__steps=2), run)
    assert target.is_dir() or target.read_text() == ORIGINAL


def test_a_checkpoint_that_is_a_link_is_rejected(tiny_config, tmp_path):
    run_training(tiny_config(train__steps=2), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-2").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints" / "step-2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"), hold_lock(tmp_path / "run"):
        pass


def test_the_checkpoints_may_be_on_a_different_disk_that_must_be_there(tiny_config, tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    disk.mkdir()
    (run / "checkpoints").symlink_to(disk)
    run_training(tiny_config(train__steps=2), run, resume="never")
    assert (disk / "step-2").is_dir()
    disk.rename(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=r"checkpoints is a link to .*/disk, which does not"):
        run_training(tiny_config(train__steps=2), run)
    (tmp_path / "unmounted").rename(disk)
    assert run_training(tiny_config(train__steps=2), run)["steps"] == 2


def test_a_link_created_after_the_check_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "refuse_links", list)
    (tmp_path / "elsewhere").write_text(ORIGINAL)
    (tmp_path / "run").mkdir()
    for name in (layout.LOCK, layout.EVENTS):
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"), hold_lock(tmp_path / "run"):
        pass
    with pytest.raises(CheckpointError, match="symbolic link"):
        is_locked(tmp_path / "run")
    with pytest.raises(CheckpointError, match="symbolic link"):
        layout.append_event(tmp_path / "run", "start")
    assert (tmp_path / "elsewhere").read_text() == ORIGINAL


def test_metrics_are_not_appended_through_a_link(tiny_config, build_run, tmp_path):
    run = build_run(tiny_config())
    run.folder.mkdir()
    (run.folder / layout.METRICS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        Lines(run.folder / layout.METRICS).append({"step": 1})
    assert not (tmp_path / "elsewhere").exists()


def test_a_pipe_instead_of_a_file_is_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(CheckpointError, match="not a regular file"):
        append_line(tmp_path / "events.jsonl", {})


READERS = {
    "documents.read_document": read_document,
    "json_io.read_json": json_io.read_json,
    "json_io.LineReader": lambda path: list(json_io.LineReader(path).read()),
    "manifest.read_manifest": lambda path: read_manifest(path.parent),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_pipe_instead_of_a_file_is_not_read(read, tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(
        FlatoutError, match=r"Cannot read .*manifest\.json: it is not a regular file\."
    ):
        read(tmp_path / "manifest.json")


def test_runs_are_listed_despite_pipes_instead_of_their_files(tiny_config, tmp_path):
    layout.write_config(tmp_path, tiny_config())
    for name in (layout.EXIT_CODE, layout.METRICS):
        os.mkfifo(tmp_path / name)
    assert layout.read_exit_code(tmp_path) is None
    assert [item.state for item in runs(tmp_path).items] == ["damaged"]


@pytest.mark.parametrize("name", [layout.LOCK, layout.EVENTS])
def test_a_file_with_a_second_hard_link_is_not_written_in_place(name, tmp_path):
    (tmp_path / "elsewhere").write_text(ORIGINAL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).hardlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(CheckpointError, match=f"{name} has a second hard link.* Fix: .*cp .*{name}"),
        hold_lock(tmp_path / "run"),
    ):
        layout.append_event(tmp_path / "run", "start")
    assert (tmp_path / "elsewhere").read_text() == ORIGINAL


@pytest.mark.parametrize("part", [None, WorkPart(1, 2)], ids=["alone", "in-parts"])
def test_prepare_does_not_write_through_a_link(part, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.part").write_text(ORIGINAL)
    (tmp_path / ".set.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="symbolic link"), WorkDir(tmp_path / "set", part):
        pass
    assert (tmp_path / "elsewhere" / "mine.part").read_text() == ORIGINAL
