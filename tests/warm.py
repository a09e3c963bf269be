"""Processes that start in milliseconds: forks of a server that has imported torch and flatout.

A test that is about what a process does, not about how it starts, need not import torch again,
which takes two seconds, or more where several processes share the cores.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

POLL_S = 0.01
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "flatout.cli.commands.train", "flatout.training.run"]
)


class Process:
    """`python WORDS...` in a separate process; used like `subprocess.Popen` with pipes."""

    def __init__(self, words, *, env=None, cwd="."):
        folder = Path(tempfile.mkdtemp(prefix="flatout-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._paths = [folder / name for name in ("out", "err")]
        for path in self._paths:
            path.touch()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        if env is None:
            environment.pop("RANK", None)
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when the server imports it
        try:
            given = list(map(str, words)), environment, str(Path(cwd).resolve()), self._paths
            self._process = CONTEXT.Process(target=_run, args=given)
            self._process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=240):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return [path.read_text(encoding="utf-8", errors="replace") for path in self._paths]


def _run(words, environment, folder, paths):
    """Run the program in the child, as Python would."""
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = [entry for entry in sys.path if entry]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def run(words, *, env=None, cwd=".", timeout=240):
    """Run `python WORDS...`, and return a `subprocess.CompletedProcess`."""
    process = Process(words, env=env, cwd=cwd)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def start_ranks(words, count=2, *, env=None, cwd="."):
    """Start the processes of a run with the variables of torchrun."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        **(env or {}),
    }
    return [
        Process(words, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=cwd)
        for rank in range(count)
    ]


def run_ranks(words, count=2, *, env=None, cwd=".", timeout=240):
    """Run `python WORDS...` as the ranks of a run. When one fails, the others are terminated.

    Returns: a `subprocess.CompletedProcess` with the output of all, and the first code that is
             not 0.
    """
    ranks, give_up = start_ranks(words, count, env=env, cwd=cwd), time.monotonic() + timeout
    failed = None
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < give_up:
            bad = [rank for rank in ranks if rank.poll()]
            if bad and failed is None:
                failed = bad[0].returncode
                for rank in ranks:
                    rank.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [rank.communicate() for rank in ranks]
    code = failed or next((rank.returncode for rank in ranks if rank.returncode), 0)
    out, err = ("".join(parts) for parts in zip(*outputs, strict=True))
    return subprocess.CompletedProcess(words, code, out, err)
