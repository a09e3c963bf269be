"""The TensorBoard event file: TensorBoard reads it, and a run survives if it cannot be written."""

import errno
import os
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flatout.training.loggers import tensorboard
from flatout.training.loggers.tensorboard import TensorBoard
from flatout.training.run import run_training
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow


def curves(folder):
    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_tensorboard_reads_the_numbers_and_drops_steps_repeated_after_a_resume(tmp_path):
    first, second = TensorBoard(), TensorBoard()
    first.on_start(SimpleNamespace(folder=tmp_path, step=0))
    for step in (1, 2, 3):
        first.on_record({"step": step, "tokens": 9, "train/loss": step / 2, "perf/mfu": 0.25})
    first.close("stopped")
    second.on_start(SimpleNamespace(folder=tmp_path, step=2))
    second.on_record({"step": 3, "train/loss": 8.0})
    second.close("finished")
    assert curves(tmp_path / "tensorboard") == {
        "train/loss": [(1, 0.5), (2, 1.0), (3, 8.0)],
        "perf/mfu": [(1, 0.25), (2, 0.25)],
    }


class FullDisk:
    def __init__(self, opened):
        self.opened = opened

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        self.opened.close()


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_run_survives_an_event_file_that_cannot_be_written(
    where, tiny_config, tmp_path, monkeypatch
):
    if where == "open":
        monkeypatch.setattr(
            tensorboard,
            "open_own",
            lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))),
        )
    else:
        fdopen = os.fdopen
        monkeypatch.setattr(
            os,
            "fdopen",
            lambda file, mode, **more: (
                FullDisk(fdopen(file, mode)) if mode == "ab" else fdopen(file, mode, **more)
            ),
        )
    assert run_training(tiny_config(train__steps=2, log__every=1), tmp_path / "run")["steps"] == 2
    events = [
        event for event in RunLog(tmp_path / "run").events if event["event"] == "no_tensorboard"
    ]
    assert [event["reason"] for event in events] == [
        os.strerror(errno.EIO if where == "open" else errno.ENOSPC)
    ]


def test_without_its_logger_a_run_writes_no_event_file(tiny_config, tmp_path):
    run_training(tiny_config(train__steps=2, log__to="none"), tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
