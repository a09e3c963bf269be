"""A trial in its own process always gives a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.config.schema import load_config
from flatout.errors import ConfigError, OutOfMemory
from flatout.measure.experiments import trial
from flatout.measure.experiments.records import TrialResult, TrialSpec
from flatout.measure.experiments.trial import measured, run_trial

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SPEC = TrialSpec(config={}, folder="unused")


def program(text):
    return [sys.executable, "-c", text]


def test_a_result_is_read_from_the_last_line():
    text = (
        'import sys; sys.stdin.read(); print(\'a banner\'); print(\'{"status": "ok", '
        '"tokens_per_s": 5.0}\')'
    )
    found = run_trial(SPEC, 60, command=program(text))
    assert found.is_ok
    assert found.tokens_per_s == 5.0
    assert found.process_s > 0


def test_a_process_killed_by_a_signal_gives_a_failed_result():
    found = run_trial(SPEC, 60, command=program("import os; os.kill(os.getpid(), 9)"))
    assert found.status == "failed"
    assert "SIGKILL" in found.reason
    assert "memory" in found.reason
    assert (
        "SIGSEGV"
        in run_trial(SPEC, 60, command=program("import os; os.kill(os.getpid(), 11)")).reason
    )


@pytest.mark.parametrize("text", ["print('garbage')", 'print(\'{"status": "splendid"}\')', "pass"])
def test_a_process_that_prints_nonsense_gives_a_failed_result(text):
    found = run_trial(SPEC, 60, command=program(text))
    assert found.status == "failed"
    assert "no result" in found.reason


def test_the_last_output_of_a_broken_process_is_the_reason():
    found = run_trial(SPEC, 60, command=program("raise SystemExit('the library is not there')"))
    assert "exit code 1" in found.reason
    assert found.reason.endswith("the library is not there")


def test_a_process_that_hangs_is_killed_with_everything_it_started(tmp_path):
    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(mark)!r}).touch()"
    text = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); "
        f"time.sleep(60)"
    )
    began = time.monotonic()
    found = run_trial(SPEC, 1.5, command=program(text))
    assert time.monotonic() - began < 30
    assert found.status == "timed-out"
    time.sleep(max(0.0, 5 - (time.monotonic() - began)))
    assert not mark.exists()


def test_a_trial_ends_with_the_bench_that_started_it(tmp_path):
    """The trial has its own session, and ends shortly after the bench is killed."""
    mark = tmp_path / "pid"
    trial = "import os, pathlib, threading, time; from flatout.measure.child import end_with; "
    trial += "threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start(); "
    trial += f"pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(60)"
    parent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {trial!r}], "
        f"start_new_session=True).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT) as bench:
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.05)
        bench.kill()
    pid = int(mark.read_text())
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the trial outlived the bench")


def test_a_spec_passes_through_json():
    spec = TrialSpec(config=load_config().to_dict(), folder="x", seconds=1.5)
    assert TrialSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ConfigError("The key is wrong.", fix="Mend it."), "failed", "The key is wrong."),
        (
            OutOfMemory("Out of memory at step 0: too much.", fix="Less."),
            "out-of-memory",
            "Out of memory at step 0",
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "4000000000000000 bytes. Error code 12"
            ),
            "out-of-memory",
            "it tried to allocate 3,725,290.3 GiB.",
        ),
        (RuntimeError("can't allocate memory"), "out-of-memory", "can't allocate"),
        (MemoryError(), "out-of-memory", "Out of memory"),
        (
            ZeroDivisionError("division by zero\nmore"),
            "failed",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_every_error_becomes_a_result(monkeypatch, error, status, words):
    def fail(spec):
        raise error

    monkeypatch.setattr(trial, "measure", fail)
    found = measured(SPEC)
    assert found.status == status
    assert words in found.reason
    assert "\n" not in found.reason


def test_a_real_trial_measures_a_tiny_run(tiny_config, tmp_path):
    """End to end: a fresh process, the baseline, and none of the user's directories touched."""
    spec = TrialSpec(
        config=tiny_config(speedups="none").to_dict(),
        folder=str(tmp_path / "scratch"),
        seconds=0.05,
        loss_steps=12,
        warmup_s=0.1,
    )
    found = run_trial(spec, 240)
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
    assert not (tmp_path / "scratch" / "checkpoints").exists()
    assert TrialResult.model_validate(json.loads(found.model_dump_json())) == found
