"""The stages of a save, at once or in a thread, and after a failure; see also test_savers.py."""

import threading

import pytest
from stand_in import build, train

from flatout.training.checkpoint import catalog
from flatout.training.checkpoint import job as saving
from flatout.training.checkpoint.job import Saving, at_once
from flatout.training.checkpoint.savers import in_thread


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize("start", [at_once, in_thread])
def test_result_raises_the_error_of_the_work(start):
    done = []
    job = start(lambda: done.append(threading.current_thread() is threading.main_thread()))
    job.result()
    assert job.done()
    assert done == [start is at_once]
    failed = start(fail)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert failed.done()


def test_a_thread_is_done_when_its_work_is_done():
    gate = threading.Event()
    job = in_thread(lambda: gate.wait(60))
    assert not job.done()
    gate.set()
    job.result()
    assert job.done()


def test_afterwards_runs_once_the_checkpoint_is_complete(tmp_path):
    run, followed = build(tmp_path / "run"), []
    train(run, 2)
    made = Saving(
        run, {}, start=at_once, afterwards=lambda: followed.append(catalog.steps(run.folder))
    )
    assert made.is_ready()
    assert made.advance()
    assert (made.step, made.path, made.aside) == (2, catalog.checkpoint_path(run.folder, 2), [])
    assert catalog.verify(made.path) == []
    assert followed == [[2]]


@pytest.mark.parametrize("start", [at_once, in_thread])
def test_an_error_leaves_no_partial_checkpoint(tmp_path, monkeypatch, start):
    run = build(tmp_path / "run")
    monkeypatch.setattr(saving, "complete", lambda *_: fail())
    made = Saving(run, {}, start=start)
    with pytest.raises(ZeroDivisionError):
        made.advance()
    assert list(made.path.parent.iterdir()) == []
    other = Saving(run, {}, start=start)
    with pytest.raises(ZeroDivisionError):
        other.wait_alone()
