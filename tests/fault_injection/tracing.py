"""strace attached to a child: which system calls it makes, and faults at exact ones."""

import re
import shutil
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from children import Child

CALL = re.compile(r"(\d+) +(\w+)\((.*?)\) += (-?\d+|\?)(?:<([^>]*)>)?")
UNFINISHED = " <unfinished ...>"
RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")


@contextmanager
def traced(children: Sequence[Child], log: Path, *options: str) -> Iterator[None]:
    """Trace children that were started with `stopped` in one log, and let them continue.

    Skips the test when there is no strace, or it may not trace.
    """
    if shutil.which("strace") is None:
        for child in children:
            child.kill()
        pytest.skip("needs strace: apt install strace")
    for child in children:
        while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
    pids = [word for child in children for word in ("-p", str(child.pid))]
    tracer = subprocess.Popen(
        ["strace", "-f", *pids, "-o", str(log), *options], stderr=subprocess.PIPE, text=True
    )
    try:
        for child in children:
            _await_tracer(child, tracer)
        for child in children:
            child.send(signal.SIGCONT)
        yield
    finally:
        with suppress(subprocess.TimeoutExpired):
            tracer.wait(30)
        tracer.kill()
        tracer.communicate()


def _await_tracer(child: Child, tracer: subprocess.Popen) -> None:
    """Wait until a child is traced."""
    status = Path(f"/proc/{child.pid}/status")
    while f"TracerPid:\t{tracer.pid}\n" not in status.read_text():
        if tracer.poll() is not None:
            child.kill()
            pytest.skip(f"strace may not trace here: {tracer.stderr.read()}")
        time.sleep(0.001)


def calls(log: Path) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield thread, name, arguments and result of each call that has ended, in their order.

    A fifth item is the path of the descriptor that a call returned, or None.
    """
    begun: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        whole = line
        if line.endswith(UNFINISHED):
            begun[line.split(" ", 1)[0]] = line.removesuffix(UNFINISHED)
            continue
        if found := RESUMED.fullmatch(line):
            if found[1] not in begun:
                continue
            whole = begun.pop(found[1]) + found[2].lstrip()
        if found := CALL.match(whole):
            yield found.groups()


def counted(log: Path, *places: Path | str) -> dict[str, list[int]]:
    """Return which calls concern paths with one of `places` in them, by name.

    Each is given as how many of that name its thread had made, this included.

    A call of two threads at the same count is listed once.
    """
    so_far: Counter = Counter()
    numbers = defaultdict(set)
    for thread, name, arguments, _, path in calls(log):
        so_far[thread, name] += 1
        if any(str(place) in arguments or str(place) in (path or "") for place in places):
            numbers[name].add(so_far[thread, name])
    return {name: sorted(found) for name, found in numbers.items()}


def spread_out(numbers: list[int], most: int) -> list[int]:
    """Return at most `most` of the numbers, from the first to the last."""
    if len(numbers) <= most:
        return numbers
    return [numbers[round(i * (len(numbers) - 1) / (most - 1))] for i in range(most)]
