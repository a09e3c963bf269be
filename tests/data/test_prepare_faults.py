"""prepare with killed processes and a full disk. Most cases need the marker `faults`."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from prepared import content, write_rows

from flatout.data.store.shards import Dataset

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", 1_000)


@pytest.fixture
def many_rows(tmp_path):
    return write(tmp_path / "rows.jsonl", 5_000)


def write(path, count):
    draw = random.Random(0)
    return write_rows(path, (f"row {number} " * draw.randint(1, 40) for number in range(count)))


def start(rows, out, workers=2, *more):
    command = [
        sys.executable,
        str(HERE / "preparing.py"),
        str(rows),
        str(out),
        str(workers),
        *map(str, more),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def finish(process):
    _, said = process.communicate(timeout=120)
    return process.returncode, said


def records(out):
    """Return when each range was recorded; nothing if the directory disappears meanwhile."""
    try:
        return {
            path.name: path.stat().st_mtime_ns
            for path in (out.parent / f".{out.name}.part" / "ranges").glob("*.json")
        }
    except FileNotFoundError:
        return {}


def kill_and_go_on(rows, tmp_path, kills, seed):
    """Kill the parent or a worker of a resuming prepare at random moments; return how often."""
    assert finish(start(rows, tmp_path / "whole")) == (0, "")
    out = tmp_path / "out"
    draw = random.Random(seed)
    hit, before = 0, {}
    for _ in range(kills):
        process = start(rows, out, draw.choice([2, 3]))
        wanted = len(before) + draw.randint(0, 12)
        while process.poll() is None and len(records(out)) < wanted:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.02)
        workers = []
        with contextlib.suppress(psutil.NoSuchProcess):
            parents = psutil.Process(process.pid).children()  # the workers do not need theirs
            workers = [child for parent in parents for child in parent.children()]
        victim = draw.choice([process.pid, *[worker.pid for worker in workers]])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        code, said = finish(process)
        assert code in (0, 1, -signal.SIGKILL), said
        psutil.wait_procs(workers, timeout=30)
        if out.exists():
            break
        after = records(out)
        assert {name: after.get(name) for name in before} == before, (
            "what was done is not done again"
        )
        hit, before = hit + (code != 0), after
    assert finish(start(rows, out)) == (0, "")
    assert content(out) == content(tmp_path / "whole")
    assert not (tmp_path / ".out.part").exists()
    return hit


def test_kills_at_random_moments_do_not_change_the_result(many_rows, tmp_path):
    assert kill_and_go_on(many_rows, tmp_path, 3, 0) >= 1


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_at_random_moments(tmp_path, seed, survived):
    kills = kill_and_go_on(write(tmp_path / "rows.jsonl", 30_000), tmp_path, 20, seed)
    assert kills >= 5
    survived("prepare-kill", kills, [])


def test_prepare_resumes_after_a_file_size_limit(rows, tmp_path):
    assert finish(start(rows, tmp_path / "whole")) == (0, "")
    code, said = finish(start(rows, tmp_path / "out", 2, 10_000))
    assert code == 1
    assert "Unfinished: Cannot write" in said
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.rglob("*.bin.*.part")) == [], "no unfinished files"
    assert finish(start(rows, tmp_path / "out")) == (0, "")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.faults
@pytest.mark.parametrize("size_kib", [60, 500, 1_500, 2_500])
def test_prepare_resumes_after_a_full_disk(many_rows, tmp_path, size_kib, survived):
    assert finish(start(many_rows, tmp_path / "whole")) == (0, "")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        code, said = finish(start(many_rows, disk / "out"))
        assert code == 1
        assert "No space left on device" in said
        assert not (disk / "out").exists()
        assert size_kib < 1_000 or records(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert finish(start(many_rows, disk / "out")) == (0, "")
        assert content(disk / "out") == content(tmp_path / "whole")
        Dataset.open(disk / "out")
        survived("small", 1, [])
    finally:
        subprocess.run(["umount", str(disk)], check=True)
