"""Processes that die while they save. A few here; many more behind the marker `faults`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def saver(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(HERE / "saver.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kills_at_random_moments_lose_nothing(tmp_path):
    assert "6 kills" in saver(tmp_path, "random", 6, 0)


def test_kills_between_any_two_file_operations_lose_nothing(tmp_path):
    assert "killed at" in saver(tmp_path, "every", 11, 3)


def test_a_disk_that_takes_no_more_keeps_what_it_has(tmp_path):
    assert "Free space" in saver(tmp_path, "full")


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_at_random_moments(tmp_path, seed):
    assert "60 kills" in saver(tmp_path, "random", 60, seed)


@pytest.mark.faults
def test_kills_at_every_file_operation(tmp_path):
    saver(tmp_path, "every", 1, 1)
