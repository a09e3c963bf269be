"""Workers on a Ray cluster, whose nodes write ranges into one shared work directory.

Each range is a Ray task that returns the range's record. If its process or node dies, the range is
packed again elsewhere, under different temporary names, so that two attempts do not damage each
other's files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Self, TextIO

import psutil

from flatout.data.prepare.pack.jobs import Range
from flatout.data.prepare.pack.records import RangeRecord
from flatout.data.prepare.pack.tokenize import Report, Tally
from flatout.data.prepare.workers.protocol import RESUMES, Answer, Setup, in_order
from flatout.data.prepare.workers.ray_tasks import RayTasks
from flatout.errors import Interrupted, MissingPackage, RunFailed
from flatout.files import PART
from flatout.progress import SILENT, Progress

QUEUED = 2
"""Ranges per CPU of the cluster: the one being packed, and the next."""
WAIT_S = 1.0
"""Seconds to wait for a range before checking whether the cluster still responds."""
NODE_PATIENCE_S = 300.0
"""Seconds to wait for a node with a CPU: one that is started on demand takes minutes."""
HEAD_PATIENCE_S = 30.0
"""Seconds to wait for the head node; after 60 seconds Ray ends this process without our message."""
_BY_RAY = re.compile(r"(?:\x1b\[\d+m)?\(raylet[^)]*\)(?:\x1b\[\d+m)? *")
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")


def ray_package() -> Any:
    """Return the package ray.

    Raises: MissingPackage with its install line.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingPackage(
            "--engine ray needs the package ray, which is not installed.",
            fix='Install it: `pip install "flatout[ray]"`.',
        ) from error


class RayWorkers:
    """The running Ray cluster, or one started on this machine until this context manager exits.

    `limit` bounds the ranges packed at a time; None uses all CPUs of the cluster.
    """

    def __init__(self, limit: int | None = None, *, progress: Progress = SILENT) -> None:
        self._ray = ray_package()
        self._limit = limit
        self._progress = progress
        self._running: dict[Any, tuple[int, Range]] = {}
        self._context = contextlib.ExitStack()
        self._cluster = (0, 0)
        self._answered_at = self._had_cpus_at = time.monotonic()
        self._checked_at = 0.0

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            with contextlib.ExitStack() as context:
                output = _WithoutDumps(sys.stdout, self._progress)
                context.enter_context(contextlib.redirect_stdout(output))
                context.callback(self._ray.shutdown)
                before = _raylets()
                with self._progress.task("Connecting to Ray"), _own_sigterm():
                    self._connect()
                self._progress.say(
                    "Using the running Ray cluster."
                    if _raylets() == before
                    else "Started a Ray cluster on this machine."
                )
                self._context = context.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._context:
            self._stop()

    def _connect(self) -> None:
        try:
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            raise RunFailed(
                f"Cannot connect to Ray: {' '.join(str(error).split())}",
                fix="Check RAY_ADDRESS, and the cluster with `ray status`.",
            ) from error

    def pack(
        self, ranges: Sequence[Range], setup: Setup, report: Report = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the ranges on the cluster and yield their records in order.

        Raises: DataError for the first bad row in the order of the ranges; RunFailed when the
                cluster fails.
        """
        mark = setup.folder / f"{uuid.uuid4().hex}{PART}"
        mark.touch()
        try:
            tasks = RayTasks(self._ray, setup, mark)
            submit = functools.partial(self._submit, tasks)
            yield from in_order(ranges, submit, lambda: self._collect(tasks, report))
        finally:
            self._stop()
            mark.unlink(missing_ok=True)

    def _submit(self, tasks: RayTasks, ranges: Sequence[Range], submitted: int) -> int:
        """Submit ranges from `submitted` on while the cluster has room; return the next index."""
        room = self._limit or max(1, QUEUED * self._cpus())
        while submitted < len(ranges) and len(self._running) < room:
            self._running[tasks.submit(ranges[submitted])] = (submitted, ranges[submitted])
            submitted += 1
        return submitted

    def _collect(self, tasks: RayTasks, report: Report) -> list[Answer]:
        """Wait up to `WAIT_S` for ranges to finish, and return their results."""
        ready, _ = self._ray.wait(list(self._running), timeout=WAIT_S)
        if not ready:
            self._cpus()
        ended = []
        for reference in ready:
            index, work = self._running.pop(reference)
            result = tasks.result(reference, work)
            if isinstance(result, RangeRecord):
                report(Tally(result.num_bytes, result.documents, result.tokens))
            ended.append((index, result))
        return ended

    def _cpus(self) -> int:
        """Return the number of CPUs of the cluster; report when it changes.

        Raises: RunFailed when there has been none for a while, or the head node is gone.
        """
        now = time.monotonic()
        if now - self._checked_at < WAIT_S:
            return self._cluster[1]
        self._checked_at = now
        if not self._head_answers():
            if now - self._answered_at > HEAD_PATIENCE_S:
                raise RunFailed(
                    "The head node of the Ray cluster is gone.", fix=f"Start a cluster. {RESUMES}"
                )
            return self._cluster[1]
        self._answered_at = now
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        nodes, cpus = len(alive), int(sum(resources.get("CPU", 0) for resources in alive))
        if (nodes, cpus) != self._cluster:
            self._cluster = nodes, cpus
            self._progress.say(
                f"CPUs of the Ray cluster: {cpus}, on {nodes} node{'s' * (nodes != 1)}."
            )
        if cpus:
            self._had_cpus_at = now
        elif now - self._had_cpus_at > NODE_PATIENCE_S:
            raise RunFailed("No node of the Ray cluster has a CPU.", fix=f"Start nodes. {RESUMES}")
        return cpus

    def _head_answers(self) -> bool:
        """Return whether the head node can be reached; a call to Ray would block instead."""
        host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_S).close()
        except OSError:
            return False
        return True

    def _stop(self) -> None:
        """Cancel running tasks and wait until their processes end, so that none still writes."""
        if self._running and self._ray.is_initialized():
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=10)
        self._running.clear()


class _WithoutDumps(io.TextIOBase):
    """Standard output with Ray's long messages about dead processes cut to one sentence each."""

    def __init__(self, stdout: TextIO, progress: Progress) -> None:
        self._stdout = stdout
        self._progress = progress
        self._dropped = False

    def write(self, text: str) -> int:
        """Write the text, or report the first sentence of a message by Ray."""
        if by_ray := _BY_RAY.match(text):
            sentence = _SENTENCE_END.split(text[by_ray.end() :])[0]
            self._progress.say(f"Ray: {sentence}.")
        elif not (self._dropped and text == "\n"):
            self._stdout.write(text)
        self._dropped = bool(by_ray)
        return len(text)

    def flush(self) -> None:
        """Flush what was written."""
        self._stdout.flush()


def _raylets() -> set[int]:
    """Return the Ray nodes that this process started."""
    return {child.pid for child in psutil.Process().children() if child.name() == "raylet"}


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore this program's SIGTERM handler, which Ray replaces permanently."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise Interrupted(
            "Terminated.", fix="Run the same command again.", signal_number=signal.SIGTERM
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
