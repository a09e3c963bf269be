"""The watchdog: what it says about a source, a save and a rank that hang, and how it ends them."""

import functools
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from stand_in import ALONE

from flatout.assembly.run import Pulse
from flatout.config.schema import load_config
from flatout.data.load.batches import ShardReader
from flatout.training import run as training
from flatout.training import watchdog
from flatout.training.checkpoint import savers
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code
from flatout.training.watchdog import Watchdog

LONG_S = 60.0
"""More than anything here takes; a test fails after it."""


def wait_until(true):
    give_up = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def idle_run(tmp_path):
    """Return a function that makes a run without work, of which the watchdog knows."""

    def make(**settings):
        train = load_config(None, [f"train.{key}={value}" for key, value in settings.items()])
        return SimpleNamespace(config=train, pulse=Pulse(), mesh=ALONE, folder=tmp_path, step=7)

    return make


def test_a_stall_and_its_end_are_told_and_recorded(idle_run, events):
    run, said = idle_run(watchdog_minutes=0.001), []
    run.pulse.activity = "training"
    with Watchdog(run, say=said.append):
        wait_until(lambda: said and "watchdog.txt" in {path.name for path in run.folder.iterdir()})
        run.pulse.beat()
        wait_until(lambda: len(said) >= 2)
    path = run.folder / "watchdog.txt"
    assert said[0] == (
        "No progress for 0.1 s after step 7, while training. "
        f"The stacks of all threads of each process are in {path}."
    )
    (stall,) = events(run.folder, "stall")
    assert (stall["text"], stall["path"]) == (said[0], str(path))
    assert f"rank 0, process {os.getpid()}\nNo progress for 0.1 s" in path.read_text()
    assert "is MainThread" in path.read_text()
    assert said[1].startswith("Step 8 continues after ")
    assert events(run.folder, "stall_over")[0]["text"] == said[1]


def test_zero_minutes_turn_it_off(idle_run):
    before = threading.active_count()
    with Watchdog(idle_run(watchdog_minutes=0)):
        assert threading.active_count() == before


def test_a_process_that_stops_shows_so_in_its_exit_code(idle_run):
    run, codes = idle_run(watchdog_minutes=0.0005, watchdog_stop="true"), []
    with Watchdog(run, end=codes.append):
        wait_until(lambda: codes)
    assert codes == [75]
    assert read_exit_code(run.folder) == 75


def test_every_rank_adds_its_stacks_and_only_the_first_one_speaks(idle_run, events):
    run, codes, said = idle_run(watchdog_minutes=0.01, watchdog_stop="true"), [], []
    second = SimpleNamespace(**vars(run) | {"mesh": replace(ALONE, rank=1, world_size=2)})
    with Watchdog(run, say=said.append, end=codes.append), Watchdog(second, end=codes.append):
        wait_until(lambda: len(codes) >= 2)
    assert len(said) == len(events(run.folder, "stall")) == 1
    text = (run.folder / "watchdog.txt").read_text()
    assert text.count("No progress for") == 2
    assert ", rank 0, process" in text
    assert ", rank 1, process" in text


def test_a_full_disk_does_not_silence_it(idle_run):
    run, said = idle_run(watchdog_minutes=0.0005), []
    (run.folder / "watchdog.txt").mkdir()
    with Watchdog(run, say=said.append):
        wait_until(lambda: len(said) == 2)
    assert said[1].startswith("The stacks of all threads cannot be written: ")


@pytest.mark.slow
def test_a_source_that_hangs_is_reported_with_its_stack(
    tiny_config, tmp_path, monkeypatch, messages, events
):
    run, read, calls = tmp_path / "run", ShardReader.read, []

    def reports():
        path = run / "watchdog.txt"
        return path.read_text() if path.exists() else ""

    def hanging_read(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            wait_until(lambda: "in hanging_read" in reports())
        read(self, *arguments)

    monkeypatch.setattr(ShardReader, "read", hanging_read)
    config = tiny_config(train__watchdog_minutes=0.01, train__steps=12)
    assert run_training(config, run, progress=messages)["steps"] == 12
    assert "while training" in events(run, "stall")[0]["text"]
    assert "is flatout-loader" in reports()
    assert any(line.startswith("No progress for") for line in messages.lines)


@pytest.mark.slow
def test_a_save_that_hangs_ends_the_process_if_wanted(tiny_config, tmp_path, monkeypatch, events):
    run, write, codes, seen = tmp_path / "run", savers.write_share, [], []

    def hanging_write(*arguments):
        wait_until(lambda: codes)
        seen.append(read_exit_code(run))
        write(*arguments)

    monkeypatch.setattr(savers, "write_share", hanging_write)
    monkeypatch.setattr(watchdog, "PATIENCE", 1)
    monkeypatch.setattr(training, "Watchdog", functools.partial(Watchdog, end=codes.append))
    config = tiny_config(
        checkpoint__every_steps=3,
        speedups="none",
        train__watchdog_minutes=0.02,
        train__watchdog_stop=True,
    )
    run_training(config, run)
    assert codes[0] == seen[0] == 75
    assert "while saving" in events(run, "stall")[0]["text"]


HANGING_MODEL = """
import os, signal, time
from flatout.models.transformer import Transformer

class Hanging(Transformer):
    calls = 0

    def forward(self, *arguments):
        Hanging.calls += 1
        if os.environ["RANK"] == "1" and Hanging.calls == 5:
            time.sleep(600)
        if os.environ["RANK"] == "0" and Hanging.calls == 7:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(*arguments)
"""


def run_hanging(model, tiny_set, tiny, tmp_path):
    """Return the run directory of two ranks, one of which hangs."""
    (tmp_path / "hanging.py").write_text(model)
    run = tmp_path / "run"
    settings = tiny | {
        "data.path": tiny_set,
        "model.kind": "hanging:Hanging",
        "batch.rows_per_device": 2,
        "train.watchdog_minutes": 0.05,
        "train.watchdog_stop": "true",
    }
    del settings["name"]
    (tmp_path / "empty.yaml").write_text("name: hanging\n")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [
            *(sys.executable, "-m", *torchrun, "-m", "flatout", "train"),
            *(str(tmp_path / "empty.yaml"), "--run-dir", str(run)),
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=240,
        check=False,
    )
    return run


@pytest.mark.slow
@pytest.mark.faults
def test_a_stopped_rank_0_does_not_keep_the_others(tiny_set, tiny, tmp_path):
    model = HANGING_MODEL.replace("== 5", "< 0")
    run = run_hanging(model, tiny_set, tiny, tmp_path)
    assert read_exit_code(run) == 75
    assert ", rank 1, process" in (run / "watchdog.txt").read_text()


@pytest.mark.slow
@pytest.mark.faults
def test_the_stacks_show_the_rank_that_hangs_and_the_run_can_be_started_again(
    tiny_set, tiny, tmp_path, events
):
    run = run_hanging(HANGING_MODEL, tiny_set, tiny, tmp_path)
    assert read_exit_code(run) == 75
    assert len(events(run, "stall")) == 1
    text = (run / "watchdog.txt").read_text()
    _, *parts = re.split(r"^.*, rank (\d), process .*$", text, flags=re.MULTILINE)
    stacks = dict(zip(parts[::2], parts[1::2], strict=True))
    assert "line 11 in forward" in stacks["1"]
    assert "hanging.py" not in stacks["0"]
