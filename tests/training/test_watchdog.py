"""The watchdog: what it says about a source, a save and a rank that hang."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from stand_in import ALONE

from flatout.assembly.run import Pulse
from flatout.config.schema import load_config
from flatout.data.load.batches import ShardReader
from flatout.training import run as training
from flatout.training import watchdog
from flatout.training.checkpoint import savers
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code
from flatout.training.watchdog import Sign, Watchdog, doing, waiting_for

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
        wait_until(lambda: len(said) >= 2)
        run.pulse.beat()
        wait_until(lambda: len(said) >= 3)
    assert said[0].startswith("No progress for 0.1 s after step 7, while training. The loop is in ")
    stall = events(run.folder, "stall")[0]
    assert said[1] == f"The stacks of all threads are in {stall['path']}."
    assert said[2].startswith("Step 8 continues after ")
    assert events(run.folder, "stall_over")[0]["text"] == said[2]


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


def test_another_rank_reports_the_stall_when_the_main_one_does_not_run(idle_run, events, capfd):
    run, codes = idle_run(watchdog_minutes=0.01, watchdog_stop="true"), []
    run.mesh = dataclasses.replace(ALONE, rank=1, world_size=2)
    folder = run.folder / "watchdog"
    folder.mkdir()
    sign(folder, 0, 0, age_s=600)
    with Watchdog(run, say=[].append, end=codes.append):
        wait_until(lambda: codes)
    assert read_exit_code(run.folder) == 75
    (stall,) = events(run.folder, "stall")
    said = capfd.readouterr().err
    silent = re.search(
        r"unreachable: rank 0 on host0, without a sign of life for ([\d.]+) min\.", stall["text"]
    )
    assert silent, stall["text"]
    assert float(silent[1]) >= 10
    assert "[rank 1] No progress for " in said
    assert "[rank 1] Stopped, killed or unreachable: rank 0 on host0" in said
    assert stall["path"].endswith("step-7-rank-1.txt")


def test_another_rank_is_silent_when_the_main_one_reports(idle_run, events, capfd):
    run, codes = idle_run(watchdog_minutes=0.01, watchdog_stop="true"), []
    main = SimpleNamespace(**vars(run) | {"mesh": dataclasses.replace(ALONE, world_size=2)})
    run.mesh = dataclasses.replace(ALONE, rank=1, world_size=2)
    with (
        Watchdog(main, say=[].append, end=codes.append),
        Watchdog(run, end=codes.append),
    ):
        wait_until(lambda: len(codes) == 2)
    assert len(events(run.folder, "stall")) == 1
    assert capfd.readouterr().err == ""


def test_a_full_disk_does_not_silence_it(idle_run):
    run, said = idle_run(watchdog_minutes=0.0005), []
    (run.folder / "watchdog").write_text("in its place")
    with Watchdog(run, say=said.append):
        wait_until(lambda: len(said) == 2)
    assert said[1].startswith("The stacks of all threads cannot be written: ")


def sign(folder, rank, beats, *, age_s=0.0, activity="training"):
    found = Sign(rank, f"host{rank}", 400, beats, activity, time.time() - age_s)
    (folder / f"rank-{rank}.json").write_text(json.dumps(dataclasses.asdict(found)))


def test_the_rank_with_the_least_work_done_is_the_one_that_others_wait_for(tmp_path):
    for rank, beats, activity in ((0, 12, "training"), (1, 11, "sampling"), (2, 12, "training")):
        sign(tmp_path, rank, beats, activity=activity)
    assert waiting_for(tmp_path, 3, late_s=9) == (
        "The others wait for rank 1 on host1 (after step 400, while sampling)."
    )
    sign(tmp_path, 1, 12)
    assert waiting_for(tmp_path, 2, late_s=9) == "All 2 ranks have done the same work."


@pytest.mark.parametrize("damaged", ['{"rank": 0', "[1]", None])
def test_ranks_without_a_sign_of_life_are_named_first(tmp_path, damaged):
    sign(tmp_path, 0, 12)
    sign(tmp_path, 1, 11)
    sign(tmp_path, 2, 12, age_s=600)
    if damaged:
        (tmp_path / "rank-3.json").write_text(damaged)
    assert waiting_for(tmp_path, 4, late_s=9) == (
        "Stopped, killed or unreachable: rank 2 on host2, without a sign of life for 10.0 min; "
        "rank 3, which never gave a sign of life."
    )


def test_the_threads_of_the_loader_and_of_a_checkpoint_are_described():
    done = threading.Event()
    threads = [
        threading.Thread(target=done.wait, name=name) for name in ("flatout-loader", "checkpoint")
    ]
    for thread in threads:
        thread.start()
    loop, loader, writer = doing(torch.device("cpu"), threading.get_ident())
    done.set()
    for thread in threads:
        thread.join()
    assert loop.startswith("The loop is in doing (watchdog.py:")
    assert loader.startswith("The data loader is reading in wait (threading.py:")
    assert writer.startswith("A checkpoint is being written, in wait (threading.py:")


def test_the_users_own_code_is_named_but_not_the_program_that_started_the_run(monkeypatch):
    done = threading.Event()

    def users_model():
        torch.nn.Identity()(None)
        done.wait()

    thread = threading.Thread(target=users_model, name="flatout-loader")
    thread.start()
    number = users_model.__code__.co_firstlineno + 2
    loader_in = f"In your code, that is in users_model (test_watchdog.py:{number})."
    wait_until(lambda: doing(torch.device("cpu"), thread.ident)[1].endswith(loader_in))
    monkeypatch.setattr(watchdog, "ENTRY", __file__)
    assert "your code" not in " ".join(doing(torch.device("cpu"), threading.get_ident()))
    done.set()
    thread.join()


@pytest.mark.slow
def test_a_source_that_hangs_is_reported_with_its_stack(
    tiny_config, tmp_path, monkeypatch, messages, events
):
    run, read, calls = tmp_path / "run", ShardReader.read, []

    def reports():
        return [path.read_text() for path in (run / "watchdog").glob("*.txt")]

    def hanging_read(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            wait_until(lambda: any("in hanging_read" in text for text in reports()))
        read(self, *arguments)

    monkeypatch.setattr(ShardReader, "read", hanging_read)
    config = tiny_config(train__watchdog_minutes=0.01, train__steps=12)
    assert run_training(config, run, progress=messages)["steps"] == 12
    told = [
        event for event in events(run, "stall") if "The data loader is reading in" in event["text"]
    ]
    assert told
    assert "while training" in told[0]["text"]
    assert "is flatout-loader" in reports()[0]
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
    """Return the run directory and the standard error of two ranks, one of which hangs."""
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
    done = subprocess.run(
        [
            *(sys.executable, "-m", *torchrun, "-m", "flatout", "train"),
            *(str(tmp_path / "empty.yaml"), "--run-dir", str(run)),
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=240,
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    return run, done.stderr


@pytest.mark.slow
@pytest.mark.faults
def test_a_stopped_rank_0_is_named_by_another(tiny_set, tiny, tmp_path, events):
    model = HANGING_MODEL.replace("== 5", "< 0")
    run, errors = run_hanging(model, tiny_set, tiny, tmp_path)
    assert read_exit_code(run) == 75
    (stall,) = events(run, "stall")
    assert "unreachable: rank 0" in stall["text"]
    assert "[rank 1] No progress for " in errors


@pytest.mark.slow
@pytest.mark.faults
def test_the_rank_that_hangs_is_named_and_the_run_can_be_started_again(
    tiny_set, tiny, tmp_path, events
):
    run, errors = run_hanging(HANGING_MODEL, tiny_set, tiny, tmp_path)
    assert "[rank 1] No progress" not in errors
    assert read_exit_code(run) == 75
    (stall,) = events(run, "stall")
    assert "The others wait for rank 1" in stall["text"]
    assert "In your code" not in stall["text"], "rank 0 waits in flatout"
    (stacks,) = (run / "watchdog").glob("*-rank-1.txt")
    assert "In your code, that is in forward (hanging.py:11)." in stacks.read_text()
