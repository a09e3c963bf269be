"""Disks that are full or read-only: messages without tracebacks, and the run goes on later."""

import random
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from children import wait_until
from victim import saved_step, saving

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = 40
FILLED = 4
"""Times that a disk fills up, for each way to save."""


@pytest.fixture
def disk(tmp_path):
    """A small file system in memory, and a function that mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if (
        sys.platform != "linux"
        or subprocess.run(words, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting is not allowed here")

    def remount(options):
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    yield folder, remount
    subprocess.run(["umount", str(folder)], check=True)


def fill(file):
    """Write a file that takes all free space, to the last byte."""
    with file.open("ab", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while ballast.write(bytes(size)):
                    pass


@pytest.mark.parametrize("way", ["loop", "beside"])
def test_a_disk_that_fills_up_during_training_loses_no_saved_step(way, disk, victim, survived):
    (folder, _), target, problems = disk, victim(STEPS, way), []
    draw, ballast = random.Random(way), folder / "ballast"
    assert target.whole
    for number in range(FILLED):
        run = folder / f"run-{number}"
        child = target.children.start(*target.words(run))
        wait_until(lambda run=run: saving(run), child=child)
        time.sleep(draw.uniform(0, 0.1))
        fill(ballast)
        ended = child.wait()
        found = ["a traceback: " + ended.err[-2000:]] if "Traceback" in ended.err else []
        found += [f"ended in {ended.code}"] if ended.code not in (0, 1) else []
        found += target.lost(run, saved_step(run))
        ballast.unlink()
        problems += [*found, *target.end(run)]
    survived("small", FILLED, problems)


def test_a_read_only_run_can_be_used_but_not_changed(disk, victim, tmp_path, survived):
    (folder, remount), target, problems = disk, victim(STEPS), []
    run = target.copy(target.halfway, folder / "run")
    text = tmp_path / "book.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100)
    writing = (
        target.words(run),
        target.words(folder / "new"),
        ["export", run, "--json"],
        ["prepare", text, "--out", folder / "data", "--tokenizer", "byte", "--json"],
    )
    reading = (
        ["generate", run, "--prompt", "the", "--max-tokens", 4, "--json"],
        ["eval", run, "--json"],
        ["runs", folder, "--json"],
        ["export", run, "--out", tmp_path / "export", "--json"],
    )
    remount("ro")
    try:
        for words in writing:
            ended = target.children.run(*words)
            said = ended.out + ended.err
            if ended.code not in (1, 2) or "Fix:" not in said or "Traceback" in said:
                problems.append(f"{words[0]} ended in {ended.code}: {said[-2000:]}")
        for words in reading:
            ended = target.children.run(*words)
            if ended.code:
                problems.append(f"{words[0]} ended in {ended.code}: {ended.err[-2000:]}")
    finally:
        remount("rw")
    problems += target.end(run)
    survived("read-only", len(writing) + len(reading), problems)
