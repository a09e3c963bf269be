"""Signals to real processes, in every phase. No process stays, and the run continues exactly."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from flatout.training.run_dir.layout import read_exit_code
from flatout.training.run_dir.runlog import RunLog

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ROOT = Path(__file__).parents[2]
FLATOUT = [sys.executable, "-m", "flatout"]
BLOCKED_SAVES = """
import sys, time
from flatout.cli.main import main
from flatout.training.checkpoint import savers
from flatout.training.run_dir.runlog import RunLog
def blocked(snapshot, temporary):
    print("saving", flush=True)
    time.sleep(600)
savers.write_share = blocked
main(sys.argv[1:])
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a command in a new process. What it started ends with it."""
    processes = []

    def begin(*command, **variables):
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def descendants(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_until(true, process) -> None:
    while not true() and process.poll() is None:
        time.sleep(0.02)


def ended(process, *, children=()) -> int:
    """Wait for a process; check that its children ended with it, and return its exit code."""
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    return process.returncode


@pytest.fixture
def recipe(tmp_path, tiny, tiny_set):
    """Return a function that writes a recipe, changed by settings."""

    def write(**changes):
        values = {**tiny, "data.path": str(tiny_set), "batch.rows_per_device": 1}
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        document = {}
        for key, value in values.items():
            section, _, last = key.rpartition(".")
            (document.setdefault(section, {}) if section else document)[last] = value
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(document))
        return "my.yaml"

    return write


def kinds(run: Path) -> list[str]:
    events = run / "events.jsonl"
    return [event["event"] for event in RunLog(run).events] if events.exists() else []


@pytest.mark.parametrize("devices", [1, 2])
def test_signals_at_random_moments_change_nothing(start, recipe, tmp_path, devices):
    name = recipe(
        train__steps=60,
        train__eval_every=3,
        train__sample_every=5,
        checkpoint__every_steps=7,
        model__dropout=0.1,
        train__devices=devices,
        speedups="auto,-compile,+async-checkpoints",
    )
    whole = start(*FLATOUT, "train", name, "--run-dir", "whole", "--json")
    out, err = whole.communicate(timeout=240)
    assert whole.returncode == 0, err
    draw, codes, run = random.Random(devices), [], tmp_path / "run"
    for number in range(6):
        process = start(*FLATOUT, "train", name, "--run-dir", "run", "--json")
        kind = draw.choice([signal.SIGTERM, signal.SIGUSR1])
        if number % 2:  # after the first event of this process
            before = len(kinds(run))
            wait_until(lambda before=before: len(kinds(run)) > before, process)
            time.sleep(draw.uniform(0, 0.5))
            kind = draw.choice([kind, signal.SIGINT])
        else:  # Python starts with the system's handlers
            time.sleep(draw.uniform(0.2, 4))
        if process.poll() is not None:
            break
        children = descendants(process)
        process.send_signal(kind)
        codes.append(ended(process, children=children))
    assert set(codes) <= {0, 75, 138, 143, -signal.SIGTERM, -signal.SIGUSR1}, codes
    assert 75 in codes
    last = start(*FLATOUT, "train", name, "--run-dir", "run", "--json")
    again, err = last.communicate(timeout=240)
    assert last.returncode == 0, err
    keys = ("weights_sha256", "val_loss", "best_val_loss", "best_step")
    first, second = json.loads(out), json.loads(again)
    assert [second[key] for key in keys] == [first[key] for key in keys]
    assert values(run) == values(tmp_path / "whole")


def values(run: Path) -> list[tuple]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("train/loss"), line.get("val/loss")) for line in lines]


def test_a_signal_while_compiling_takes_effect_at_once(start, recipe, tmp_path):
    name = recipe(speedups="auto,+compile", model__num_layers=6)
    process = start(
        *FLATOUT, "train", name, "--run-dir", "run", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")
    )
    wait_until(lambda: "speedup" in kinds(tmp_path / "run"), process)
    time.sleep(0.5)
    children = descendants(process)
    process.send_signal(signal.SIGTERM)
    assert ended(process, children=children) == 75
    assert read_exit_code(tmp_path / "run") == 75
    assert "compiled" not in kinds(tmp_path / "run")
    assert kinds(tmp_path / "run")[-2:] == ["stop", "exit"]


def test_a_second_ctrl_c_exits_while_a_save_hangs(start, recipe, tmp_path):
    name = recipe(train__steps=100_000, speedups="auto,-compile,+async-checkpoints")
    words = ("train", name, "--run-dir", "run")
    process = start(sys.executable, "-c", BLOCKED_SAVES, *words)
    wait_until(lambda: "speedup" in kinds(tmp_path / "run"), process)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    time.sleep(1.1)  # sooner, it would be the first request arriving twice
    process.send_signal(signal.SIGINT)
    assert ended(process) == 130
    assert read_exit_code(tmp_path / "run") == 130
    again = start(*FLATOUT, *words)
    before = len(kinds(tmp_path / "run"))
    wait_until(lambda: len(kinds(tmp_path / "run")) > before, again)
    again.send_signal(signal.SIGTERM)
    assert ended(again) == 75
    assert not list((tmp_path / "run" / "checkpoints").glob("*tmp*"))


def test_a_process_that_waits_for_others_ends_at_a_signal(start, recipe):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    process = start(
        *FLATOUT, "train", recipe(), MASTER_ADDR="127.0.0.1", MASTER_PORT="29787", **variables
    )
    waits = next((line for line in process.stderr if "Waiting at" in line), None)
    assert waits is not None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM


def test_prepare_ends_its_processes_and_continues(start, tmp_path):
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=5)) for _ in range(5000)]
    for index in range(8):
        text = " ".join(draw.choices(words, k=400_000))
        (tmp_path / f"{index}.txt").write_text(f"{text}\n" * 4)
    sources = [f"{index}.txt" for index in range(8)]
    command = [
        *FLATOUT,
        "prepare",
        *sources,
        "--tokenizer",
        "train:2000",
        "--workers",
        "2",
        "--out",
    ]
    process = start(*command, "data")
    wait_until(lambda: list(tmp_path.glob(".data.part/ranges/*.json")), process)
    children = descendants(process)
    for each in (process, *children):  # as a scheduler signals every process of a job
        each.send_signal(signal.SIGUSR1)
    assert ended(process, children=children) == 128 + signal.SIGUSR1
    for out in ("data", "whole"):
        assert ended(start(*command, out)) == 0
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / out).glob("*.bin")}
        for out in ("data", "whole")
    ]
    assert found[0] == found[1] != {}
