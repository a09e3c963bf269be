"""The soak finds memory and files that grow, and passes for a short time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import soak

ROOT = Path(__file__).parents[2]


def test_a_long_run_may_not_need_more_than_a_short_one():
    short = [(300.0, 20), (400.0, 24)]
    assert soak.grown(short, [(400.0, 24)] * 99) == []
    more = [(400.0 + step, 24) for step in range(100)]
    assert soak.grown(short, more) == ["400 MiB of memory became 499"]
    files = [(400.0, 24 + step // 10) for step in range(100)]
    assert soak.grown(short, files) == ["24 open files became 33"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("words", [("--minutes", "0.5"), ("--kills", "10")], ids=" ".join)
def test_a_short_soak_finds_nothing(words):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "fault_injection" / "soak.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no problem\n")
