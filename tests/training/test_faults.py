"""Processes killed while they save: a few beside the loop by default, many with `faults`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
WAYS = pytest.mark.parametrize("way", ["loop", "beside"])


def saver(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        str(HERE / "saver.py"),
        *map(str, arguments),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kills_between_any_two_file_operations_lose_nothing(tmp_path):
    assert "killed at" in saver(tmp_path, "beside", "every", 11, 3)


@pytest.mark.thorough
def test_a_full_disk_keeps_existing_checkpoints(tmp_path):
    assert "`ulimit -f`" in saver(tmp_path, "beside", "full")


@pytest.mark.faults
@WAYS
@pytest.mark.parametrize("seed", range(2))
def test_many_kills_at_random_moments(tmp_path, way, seed, survived):
    assert "60 kills" in saver(tmp_path, way, "random", 60, seed)
    survived("kill", 60, [])


@pytest.mark.faults
def test_a_full_disk_keeps_existing_checkpoints_without_a_copy(tmp_path):
    assert "`ulimit -f`" in saver(tmp_path, "loop", "full")


@pytest.mark.faults
@WAYS
def test_kills_at_every_file_operation(tmp_path, way, survived):
    said = saver(tmp_path, way, "every", 1, 1)
    survived("call", int(re.match(r"killed at (\d+) moments", said)[1]), [])
