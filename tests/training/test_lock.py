"""What a failed start leaves, and the lock of another start that waited for it."""

import threading
import time

import pytest

from flatout.errors import CheckpointError
from flatout.training.run_dir import layout, lock
from flatout.training.run_dir.lock import hold_lock, is_locked


def test_a_failed_start_leaves_nothing(tmp_path):
    with hold_lock(tmp_path / "runs" / "new"):
        (tmp_path / "runs" / "new" / layout.ORIGIN).write_text("{}")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_start_keeps_existing_files(tmp_path):
    (tmp_path / "mine").mkdir()
    with hold_lock(tmp_path / "mine" / "run"):
        pass
    (tmp_path / "mine" / "a.txt").write_text("a")
    with hold_lock(tmp_path / "mine"):
        assert is_locked(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["a.txt"]


def test_a_run_keeps_its_lock(tmp_path):
    with hold_lock(tmp_path / "run"):
        (tmp_path / "run" / layout.CONFIG).write_text("")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        layout.CONFIG,
        layout.LOCK,
    ]


def test_a_lock_file_deleted_while_another_process_waits_is_created_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 30.0)
    held, done = threading.Event(), threading.Event()

    def wait_for_it():
        with hold_lock(tmp_path / "run"):
            held.set()
            done.wait(60)

    other = threading.Thread(target=wait_for_it)
    with hold_lock(tmp_path / "run"):
        other.start()
        time.sleep(0.2)  # it now waits for the lock file that is deleted
    assert held.wait(60)
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.1)
    try:
        with (
            pytest.raises(CheckpointError, match="is in use by process"),
            hold_lock(tmp_path / "run"),
        ):
            pass
    finally:
        done.set()
        other.join()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["n" * 300, "d/" * 3000])
def test_a_path_too_long_for_the_disk_is_named(tmp_path, name):
    with (
        pytest.raises(CheckpointError, match="cannot be written: File name too long"),
        hold_lock(tmp_path / name),
    ):
        pass
