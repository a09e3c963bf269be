"""Saves in the loop and in the background write the same files and report every error."""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from stand_in import build, outcome, train

from flatout.errors import RunFailed
from flatout.progress import SILENT
from flatout.training.checkpoint import catalog, host_copy, read_write, savers, tensors
from flatout.training.checkpoint.merged import read_merged
from flatout.training.checkpoint.savers import Saver, in_background
from flatout.training.saving import closing_saver

ENVIRONMENT = {"torch": "2.13"}


@pytest.fixture
def gate(monkeypatch):
    """Keep threads from writing copies until it is set."""
    gate, write_share = threading.Event(), savers.write_share

    def gated(snapshot, temporary):
        assert not snapshot.is_copied or gate.wait(60)
        write_share(snapshot, temporary)

    monkeypatch.setattr(savers, "write_share", gated)
    yield gate
    gate.set()


class GateOpener:
    """A progress that sets the gate when a task starts, and records the lines."""

    def __init__(self, gate):
        self.gate, self.steps, self.lines = gate, [], []

    @contextmanager
    def task(self, what, **_):
        self.steps.append(what)
        self.gate.set()
        yield

    def say(self, line):
        self.lines.append(line)


def full(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def saved_in_the_loop(run, folder):
    """Return the files that a save in the loop writes now, in a different directory."""
    own, run.folder = run.folder, folder
    path = savers.save(run, environment=ENVIRONMENT)
    run.folder = own
    return files(path)


def save(saver, run, keep=9):
    saver.save(run, environment=ENVIRONMENT, keep=keep)


def test_a_background_save_writes_the_files_of_a_save_in_the_loop(tmp_path, gate):
    run, saver = build(tmp_path / "beside"), in_background()
    train(run, 3)
    wanted = saved_in_the_loop(run, tmp_path / "loop")
    save(saver, run)
    train(run, 4)
    assert saver.finished() == []
    gate.set()
    saver.wait()
    (saved,) = saver.finished()
    assert (saved.step, saved.path) == (3, tmp_path / "beside" / "checkpoints" / "step-3")
    assert files(saved.path) == wanted
    assert catalog.verify(saved.path) == []
    assert 0 < saved.blocked_s <= saved.seconds


def test_saving_does_not_change_training(tmp_path):
    plain = build(tmp_path / "plain")
    train(plain, 6)
    unbroken = outcome(plain, 3)
    run, saver = build(tmp_path / "run"), in_background()
    for _ in range(6):
        save(saver, run)
        train(run, 1)
    saver.wait()
    assert outcome(run, 3) == unbroken
    again = build(tmp_path / "run", seed=9)
    read_write.load(again, catalog.checkpoint_path(run.folder, 5))
    train(again, 1)
    assert outcome(again, 3) == unbroken


@pytest.mark.parametrize("make", [Saver, in_background])
def test_a_complete_save_is_reported_once_and_then_old_ones_are_deleted(tmp_path, make):
    run, saver = build(tmp_path / "run"), make()
    reported = []
    for _ in range(5):
        train(run, 1)
        run.best_step = 2
        save(saver, run, keep=1)
        assert saver.newest_step == run.step
        saver.wait()
        reported += saver.finished()
    assert [saved.step for saved in reported] == [1, 2, 3, 4, 5]
    assert catalog.steps(run.folder) == [2, 5]
    assert saver.finished() == []


@pytest.mark.parametrize("make", [Saver, in_background])
def test_failing_to_delete_an_old_checkpoint_is_an_error_and_keeps_the_new_one(
    tmp_path, monkeypatch, make
):
    run, saver = build(tmp_path / "run"), make()

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(savers, "prune", refused)

    def save_and_wait():
        save(saver, run)
        saver.wait()

    with pytest.raises(RunFailed, match="Permission denied"):
        save_and_wait()
    assert catalog.latest(run.folder) == catalog.checkpoint_path(run.folder, 0)


def test_a_second_save_waits_for_the_first(tmp_path, gate):
    run, saver, progress = build(tmp_path / "run"), in_background(), GateOpener(gate)
    train(run, 1)
    save(saver, run)
    train(run, 1)
    assert catalog.steps(run.folder) == []
    saver.save(run, environment={}, keep=9, progress=progress)
    assert progress.steps == ["Saving step 1"]
    assert 1 in catalog.steps(run.folder)
    saver.wait()
    assert [saved.step for saved in saver.finished()] == [1, 2]


def test_a_best_step_not_on_disk_yet_does_not_delete_the_previous_best(tmp_path, gate):
    run, saver = build(tmp_path / "run"), in_background()
    for run.step in (1, 2):
        savers.save(run)
    run.step, run.best_step = 3, 1
    save(saver, run, keep=1)
    run.best_step = 4
    gate.set()
    saver.wait()
    assert catalog.steps(run.folder) == [1, 3]


def poll(run, saver):
    """Wait for the thread by polling after every step, as the loop does."""
    for _ in range(10_000):
        saver.finished()
        train(run, 1)


def wait(run, saver):
    saver.wait()


def save_again(run, saver):
    save(saver, run)


@pytest.mark.parametrize("detect", [poll, wait, save_again])
def test_a_failure_in_the_thread_is_raised_in_the_loop_and_keeps_older_checkpoints(
    tmp_path, monkeypatch, detect
):
    run, saver = build(tmp_path / "run"), in_background()
    path = savers.save(run)
    train(run, 1)
    monkeypatch.setattr(tensors, "write", full)
    save(saver, run, keep=1)
    with pytest.raises(
        RunFailed, match=r"A checkpoint cannot write its files: .*No space left"
    ) as failed:
        detect(run, saver)
    assert failed.value.fix == "Free space on that disk, then run the same command again."
    assert [p.name for p in path.parent.iterdir()] == ["step-0"]
    assert catalog.latest(run.folder) == path
    saver.wait()
    assert saver.finished() == []


def test_a_run_that_fails_waits_for_the_checkpoint(tmp_path, gate):
    run, saver = build(tmp_path / "run"), in_background()
    save(saver, run)
    gate.set()
    saver.close()
    assert [saved.step for saved in saver.finished()] == [0]
    assert catalog.verify(catalog.checkpoint_path(run.folder, 0)) == []
    saver.close()


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(tmp_path, gate):
    run = build(tmp_path / "run")
    run.saver = in_background()
    log = SimpleNamespace(progress=SILENT)

    def quit_during_a_save():
        with closing_saver(run, log):
            save(run.saver, run)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quit_during_a_save()
    (thread,) = [each for each in threading.enumerate() if each.name == "checkpoint"]
    gate.set()
    thread.join(60)
    assert list((run.folder / "checkpoints").iterdir()) == [], "it never becomes a checkpoint"


def test_a_failed_save_is_reported_when_another_error_ends_the_run(tmp_path, gate, monkeypatch):
    run, saver, progress = build(tmp_path / "run"), in_background(), GateOpener(gate)
    monkeypatch.setattr(tensors, "write", full)
    save(saver, run)
    gate.set()
    saver.close(progress)
    assert progress.lines == ["Step 0 could not be saved: [Errno 28] No space left on device"]
    assert saver.finished() == []


def test_a_growing_state_gets_more_memory(tmp_path):
    """Before the first step an optimizer has no moments."""
    run, saver = build(tmp_path / "run"), in_background()
    save(saver, run)
    train(run, 2)
    save(saver, run)
    unbroken = outcome(run, 3)
    saver.wait()
    again = build(tmp_path / "run", seed=5)
    read_write.load(again, catalog.checkpoint_path(run.folder, 2))
    assert outcome(again, 3) == unbroken


def test_without_memory_for_a_copy_the_loop_writes_the_state(tmp_path, monkeypatch):
    run, saver, progress = build(tmp_path / "run"), in_background(), GateOpener(threading.Event())
    monkeypatch.setattr(host_copy, "free_bytes", lambda machine: 1000)
    train(run, 1)
    wanted = saved_in_the_loop(run, tmp_path / "wanted")
    saver.save(run, environment=ENVIRONMENT, keep=9, progress=progress)
    train(run, 1)
    assert progress.lines == [
        "The host has no memory for a copy of the state: the loop waits until it is written."
    ]
    assert [saved.step for saved in saver.finished()] == [1]
    assert files(catalog.checkpoint_path(run.folder, 1)) == wanted


def test_a_save_deletes_checkpoints_of_later_steps(tmp_path, gate):
    run, saver = build(tmp_path / "run"), in_background()
    gate.set()
    for step in (7, 3):
        run.step = step
        save(saver, run)
        saver.wait()
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-3"]


def test_every_dtype_and_shape_is_copied(tmp_path):
    values = torch.arange(-6, 6)
    odd = {
        f"is_{dtype}".replace("torch.", ""): values.reshape(3, 4).to(dtype)
        for dtype in (torch.bfloat16, torch.float64, torch.int8, torch.bool)
    }
    odd |= {
        "none": torch.zeros(0, 3),
        "turned": torch.arange(12.0).reshape(3, 4).T,
        "single": torch.tensor(3.5),
    }
    paths = []
    for name, saver in {"loop": Saver(), "beside": in_background()}.items():
        run = build(tmp_path / name)
        for key, tensor in odd.items():
            run.core.register_buffer(key, tensor)
        save(saver, run)
        saver.wait()
        paths += [saved.path for saved in saver.finished()]
    assert files(paths[0]) == files(paths[1])
    weights = read_merged(paths[1])
    assert all(torch.equal(weights[key], tensor) for key, tensor in odd.items())
    assert json.loads((paths[1] / "index.json").read_text())["tensors"]["model/none"]["shape"] == [
        0,
        3,
    ]


@pytest.mark.parametrize("make", [Saver, in_background])
def test_an_error_while_merging_leaves_no_partial_checkpoint(tmp_path, monkeypatch, make):
    run, saver = build(tmp_path / "run"), make()

    def fail(*_):
        raise ZeroDivisionError

    def save_and_wait():
        save(saver, run)
        saver.wait()

    monkeypatch.setattr(savers, "complete", fail)
    with pytest.raises(ZeroDivisionError):
        save_and_wait()
    assert list((run.folder / "checkpoints").iterdir()) == []
    assert saver.newest_step is None
