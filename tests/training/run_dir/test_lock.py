"""The lock and the state of a run directory, and the cleanup after a failed start.

tests/cli/commands/test_runs.py has the table of all states.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, ConfigError
from flatout.training.run_dir import layout, lock
from flatout.training.run_dir.lock import hold_lock, is_locked
from flatout.training.run_dir.runlog import RunLog, record_exit

HOLD = """
import sys, time
from pathlib import Path
from flatout.training.run_dir.lock import hold_lock
with hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


LOOK = """
import sys, time
from pathlib import Path
from flatout.training.run_dir.lock import is_locked
from flatout.training.run_dir.runlog import RunLog, record_exit
print("looking", flush=True)
while True:
    is_locked(Path(sys.argv[1]))
    time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_second_process_is_rejected_and_the_first_one_named(tmp_path):
    run = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert is_locked(run)
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on "), hold_lock(run):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert not is_locked(run)
    with hold_lock(run):
        assert is_locked(run)
        assert json.loads((run / "lock").read_text())["pid"] == os.getpid()
    assert not is_locked(run)


@pytest.mark.slow
def test_testing_the_lock_does_not_stop_a_run_from_starting(tmp_path):
    with hold_lock(tmp_path):
        pass
    looking = subprocess.Popen(
        [sys.executable, "-c", LOOK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert looking.stdout.readline() == "looking\n"
        for _ in range(50):
            with hold_lock(tmp_path):
                pass
    finally:
        looking.kill()
        looking.wait()
        looking.stdout.close()


def test_a_directory_without_a_run_is_not_locked(tmp_path):
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["file.txt", "file.txt/run"])
def test_a_path_that_cannot_be_a_run_directory_is_named(tmp_path, path):
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be written"), hold_lock(tmp_path / path):
        pass
    assert (tmp_path / "file.txt").read_text() == "mine"


def test_a_failed_start_leaves_nothing(tmp_path):
    with hold_lock(tmp_path / "runs" / "new"):
        (tmp_path / "runs" / "new" / layout.EVENTS).write_text("{}")
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


@pytest.mark.slow
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


def test_a_new_run(tmp_path):
    layout.write_config(tmp_path, RunConfig())
    assert RunLog(tmp_path).state == "new"


def test_a_run_whose_lock_is_held_is_running(tmp_path):
    layout.write_config(tmp_path, RunConfig())
    with hold_lock(tmp_path):
        assert RunLog(tmp_path).state == "running"


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("start", "killed"),
        ("start exit=75", "stopped"),
        ("start exit=75 upload_pending", "stopped"),
        ("start exit=130", "interrupted"),
        ("start exit=1", "failed"),
        ("start exit=75 resume", "killed"),
        ("start end exit=0", "finished"),
        ("start end exit=0 resume exit=75", "stopped"),
    ],
)
def test_the_state_is_that_of_the_last_attempt(tmp_path, events, state):
    layout.write_config(tmp_path, RunConfig())
    for word in events.split():
        kind, _, code = word.partition("=")
        layout.append_event(tmp_path, kind, **({"code": int(code)} if code else {}))
    assert RunLog(tmp_path).state == state
    if "exit" in events and not events.endswith("resume"):
        record_exit(tmp_path, 2, ConfigError("Rejected.", fix="Nothing."))
        assert RunLog(tmp_path).state == state, "a rejected command changes nothing"
        assert layout.read_exit_code(tmp_path) == 2
