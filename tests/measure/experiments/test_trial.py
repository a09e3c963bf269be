"""A trial in its own process always gives a result."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from flatout.errors import ConfigError, OutOfMemory
from flatout.measure.experiments import trial
from flatout.measure.experiments.records import TrialResult, TrialSpec
from flatout.measure.experiments.trial import measured, run_trial

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SPEC = TrialSpec(config={}, folder="unused")
CPU_MEMORY = (
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000000 bytes. Error code 12"
)


def program(text):
    return [sys.executable, "-c", text]


def test_a_result_is_read_from_the_last_line():
    answer = TrialResult(status="ok", tokens_per_s=5.0).model_dump_json()
    text = f"import sys; sys.stdin.read(); print('a banner'); print({answer!r})"
    found = run_trial(SPEC, 60, command=program(text))
    assert (found.is_ok, found.tokens_per_s) == (True, 5.0)
    assert found.process_s > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", r"SIGKILL.*memory"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("print('garbage')", "no result"),
        ('print(\'{"status": "splendid"}\')', "no result"),
        ("raise SystemExit('no library')", "exit code 1.*no library$"),
    ],
)
def test_a_process_that_ends_without_a_result_gives_a_failed_one(text, words):
    found = run_trial(SPEC, 60, command=program(text))
    assert found.status == "failed"
    assert re.search(words, found.reason)


def test_a_process_that_hangs_is_killed_with_everything_it_started(tmp_path):
    mark = tmp_path / "pid"
    text = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    assert run_trial(SPEC, 5, command=program(text)).status == "timed-out"
    wait_for_end_of(int(mark.read_text()))


def test_a_trial_ends_with_the_bench_that_started_it(tmp_path):
    """The trial has its own session, and ends shortly after the bench is killed."""
    mark = tmp_path / "pid"
    trial = (
        "import os, pathlib, time; from flatout.measure.child import start_child; start_child(); "
        f"pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    parent = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {trial!r}], start_new_session=True).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT) as bench:
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.05)
        bench.kill()
    wait_for_end_of(int(mark.read_text()))


def wait_for_end_of(pid):
    """Wait until a process is gone or a zombie. The test's own time limit ends the wait."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ConfigError("The key is wrong.", fix="Mend it."), "failed", "The key is wrong."),
        (OutOfMemory("Out of memory at step 0.", fix="Less."), "out-of-memory", "at step 0"),
        (RuntimeError(CPU_MEMORY), "out-of-memory", "it tried to allocate 3,725,290.3 GiB."),
        (RuntimeError("can't allocate memory"), "out-of-memory", "can't allocate"),
        (MemoryError(), "out-of-memory", "Out of memory"),
        (ZeroDivisionError("by zero\nmore"), "failed", "ZeroDivisionError: by zero"),
    ],
)
def test_every_error_becomes_a_result(monkeypatch, error, status, words):
    monkeypatch.setattr(trial, "measure", Mock(side_effect=error))
    found = measured(SPEC)
    assert found.status == status
    assert words in found.reason
    assert "\n" not in found.reason


def test_a_real_trial_measures_a_tiny_run(tiny_config, tmp_path):
    """End to end: a fresh process, the baseline, and none of the user's directories touched."""
    limits = {"seconds": 0.05, "loss_steps": 12, "warmup_s": 0.1}
    config, scratch = tiny_config(speedups="none").to_dict(), tmp_path / "scratch"
    found = run_trial(TrialSpec(config=config, folder=str(scratch), **limits), 240)
    assert found.status == "ok", found.reason
    assert len(found.losses) == 12
    assert found.speedups == []
    assert (found.rows_per_device, found.accumulate) == (4, 2)
    assert found.warmup_steps >= 1
    assert found.warmup_s > 0
    assert found.settled is False
    assert found.data_ms + found.host_ms + found.device_ms == pytest.approx(found.step_ms)
    assert found.tokens_per_s == pytest.approx(128 / (found.step_ms / 1e3))
    assert found.environment["device"] == "cpu"
    assert not (scratch / "checkpoints").exists()
