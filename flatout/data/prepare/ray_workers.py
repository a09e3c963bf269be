"""Packing ranges on a Ray cluster, whose nodes write them into the one work folder.

A range is a task. One whose process or node dies is done again elsewhere, under temporary names of
its own, so that two attempts at one range cannot tear each other's files. What comes back of a
range is its record.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import psutil

from flatout.data.prepare.local_workers import Answer, Failure, Setup, attempt, in_order
from flatout.data.prepare.ranges import Range, RangeRecord, pack_range
from flatout.data.prepare.tokenize import Tally, Tell
from flatout.errors import DataError, Interrupted, MissingPackage, RunFailed
from flatout.files import PART, Unfinished
from flatout.progress import SILENT, Progress

QUEUED = 2
"""Ranges a CPU of the cluster holds: the one it packs, and the next."""
RETRIES = 3
"""So often a range is done again whose process or node died."""
WAIT_S = 1.0
"""How long to wait for a range before looking whether the cluster is still there."""
NODE_PATIENCE_S = 300.0
"""How long to wait for a node with a CPU when there is none: one that is started on demand takes
minutes.
"""
HEAD_PATIENCE_S = 30.0
"""How long to wait for the head node; after 60 seconds Ray ends this process without a word of
ours.
"""
_BY_RAY = re.compile(r"(?:\x1b\[\d+m)?\(raylet[^)]*\)(?:\x1b\[\d+m)? *")
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")
GOES_ON = "Run the same command again: it keeps what is done."


def ray_package() -> Any:
    """Return the package ray.

    Raises: MissingPackage with its install line.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingPackage(
            "--engine ray takes the package ray, which is not installed.",
            fix='Install it: `pip install "flatout[ray]"`.',
        ) from error


class RayCrew:
    """The running Ray cluster, or one that is started on this machine for as long as this is open.
    Use as a context manager.

    `limit` bounds the ranges that are packed at a time; None stands for all CPUs of the cluster.
    """

    def __init__(self, limit: int | None = None, *, progress: Progress = SILENT) -> None:
        self._ray = ray_package()
        self._limit = limit
        self._progress = progress
        self._running: dict[Any, tuple[int, Range]] = {}
        self._around = contextlib.ExitStack()
        self._cluster = (0, 0)
        self._answered_at = self._had_cpus_at = time.monotonic()
        self._looked_at = 0.0

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            with contextlib.ExitStack() as around:
                around.enter_context(
                    contextlib.redirect_stdout(_WithoutDumps(sys.stdout, self._progress))
                )
                around.callback(self._ray.shutdown)
                before = _raylets()
                with self._progress.task("Connecting to Ray"), _own_termination():
                    self._connect()
                self._progress.say(
                    "The running Ray cluster is used."
                    if _raylets() == before
                    else "A Ray cluster was started on this machine for this."
                )
                self._around = around.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._around:
            self._stop()

    def _connect(self) -> None:
        try:
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            raise RunFailed(
                f"Ray does not work here: {' '.join(str(error).split())}",
                fix="Check RAY_ADDRESS, and the cluster with `ray status`.",
            ) from error

    def pack(
        self, ranges: Sequence[Range], setup: Setup, tell: Tell = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the ranges on the cluster and yield their records in order.

        Raises: DataError for the first bad row in the order of the ranges; RunFailed for a cluster
                that cannot go on.
        """
        mark = setup.folder / f"{uuid.uuid4().hex}{PART}"
        mark.touch()
        try:
            order = _Order(self._ray, setup, mark)
            yield from in_order(
                ranges, functools.partial(self._give, order), lambda: self._answers(order, tell)
            )
        finally:
            self._stop()
            mark.unlink(missing_ok=True)

    def _give(self, order: _Order, ranges: Sequence[Range], given: int) -> int:
        """Give out ranges from number `given` on while the cluster has room, and return the next."""
        room = self._limit or max(1, QUEUED * self._cpus())
        while given < len(ranges) and len(self._running) < room:
            self._running[order.send(ranges[given])] = (given, ranges[given])
            given += 1
        return given

    def _answers(self, order: _Order, tell: Tell) -> list[Answer]:
        """Wait a while for a range, and return how it ended."""
        ready, _ = self._ray.wait(list(self._running), timeout=WAIT_S)
        if not ready:
            self._cpus()
        ended = []
        for reference in ready:
            index, work = self._running.pop(reference)
            result = order.result(reference, work)
            if isinstance(result, RangeRecord):
                tell(Tally(result.num_bytes, result.documents, result.tokens))
            ended.append((index, result))
        return ended

    def _cpus(self) -> int:
        """Return how many CPUs the cluster has, and say so when that has changed.

        Raises: RunFailed when there has been none for a while, or nobody to ask.
        """
        now = time.monotonic()
        if now - self._looked_at < WAIT_S:
            return self._cluster[1]
        self._looked_at = now
        if not self._head_answers():
            if now - self._answered_at > HEAD_PATIENCE_S:
                raise RunFailed(
                    "The head node of the Ray cluster is gone.", fix=f"Start a cluster. {GOES_ON}"
                )
            return self._cluster[1]
        self._answered_at = now
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cluster = (len(alive), int(sum(resources.get("CPU", 0) for resources in alive)))
        if cluster != self._cluster:
            self._cluster = cluster
            self._progress.say(
                f"CPUs of the Ray cluster: {cluster[1]}, on {cluster[0]} node{'s' * (cluster[0] != 1)}."
            )
        if cluster[1]:
            self._had_cpus_at = now
        elif now - self._had_cpus_at > NODE_PATIENCE_S:
            raise RunFailed(
                "No node of the Ray cluster has a CPU any more.", fix=f"Start nodes. {GOES_ON}"
            )
        return cluster[1]

    def _head_answers(self) -> bool:
        """Say whether the head node can be reached; to ask Ray anything would wait for it."""
        host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_S).close()
        except OSError:
            return False
        return True

    def _stop(self) -> None:
        """End what is running; its processes are gone when this returns, so that nobody writes any
        more.
        """
        if self._running and self._ray.is_initialized():
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=10)
        self._running.clear()


class _WithoutDumps(io.TextIOBase):
    """Standard output, less the pages that Ray prints there about a process or a node that died: a
    sentence is said of each.
    """

    def __init__(self, plain: TextIO, progress: Progress) -> None:
        self._plain = plain
        self._progress = progress
        self._dropped = False

    def write(self, text: str) -> int:
        """Write the text, or say the first sentence of what Ray has to say."""
        if by_ray := _BY_RAY.match(text):
            sentence = _SENTENCE_END.split(text[by_ray.end() :])[0]
            self._progress.say(f"Ray: {sentence}.")
        elif not (self._dropped and text == "\n"):
            self._plain.write(text)
        self._dropped = bool(by_ray)
        return len(text)

    def flush(self) -> None:
        """Flush what was written."""
        self._plain.flush()


class _Order:
    """How ranges are sent to the nodes of a cluster, and what their answers mean here."""

    def __init__(self, ray: Any, setup: Setup, mark: Path) -> None:
        self._ray = ray
        self._setup = setup
        self._reference = ray.put(pickle.dumps(setup))
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(_errand())
        self._around = (_version(), sys.path, os.getcwd(), str(mark))

    def send(self, work: Range) -> Any:
        """Return the reference of the range's task; what it holds is read by the nodes only once
        they are known to be of one version.
        """
        return self._task.remote(*self._around, pickle.dumps(work), [self._reference])

    def result(self, reference: Any, work: Range) -> RangeRecord | Failure:
        """Return the record, or the failure as it is to be told here."""
        exceptions = self._ray.exceptions
        try:
            node, result = self._ray.get(reference)
        except exceptions.RayTaskError as error:
            return Failure(
                f"Ray could not run prepare's work: {error}",
                "Check that the nodes have the packages of this machine.",
                RunFailed,
            )
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError) as error:
            what = f"The process that packed range {work.number} died {RETRIES + 1} times: {_first_line(error)}"
            return Failure(
                what, f"{GOES_ON} It is mostly a lack of memory: use fewer --workers.", RunFailed
            )
        except exceptions.RayError as error:
            return Failure(
                f"The Ray cluster gave range {work.number} up: {_first_line(error)}",
                GOES_ON,
                RunFailed,
            )
        if isinstance(result, str):
            return Failure(
                f"The node {node} {result}.",
                f"Install flatout {_version()} on every node, as on this machine.",
                RunFailed,
            )
        return self._judged(result, node, work) if isinstance(result, Failure) else result

    def _judged(self, failure: Failure, node: str, work: Range) -> Failure:
        """Return a node's failure as this machine's when the text is the cause, which is tried;
        else it is that node's.
        """
        if failure.kind is None:
            fix = "--engine local --workers 1 shows the traceback."
            return replace(
                failure,
                what=f"A worker of prepare failed on the node {node}: {failure.what}.",
                fix=fix,
                kind=RunFailed,
            )
        if failure.kind is DataError:
            here = attempt(
                lambda: pack_range(work, self._setup.packing, self._setup.folder, lambda _: None)()
            )
            if isinstance(here, Failure):
                return here
            return Failure(
                f"The node {node} cannot do what this machine can: {failure.what}",
                "Give sources that every node sees.",
                RunFailed,
            )
        return (
            failure
            if failure.kind is Unfinished
            else replace(failure, what=f"On the node {node}: {failure.what}")
        )


def _raylets() -> set[int]:
    """Return the Ray nodes that this process started."""
    return {child.pid for child in psutil.Process().children() if child.name() == "raylet"}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") + "."


def _version() -> str:
    return str(importlib.import_module("flatout").__version__)


@contextlib.contextmanager
def _own_termination() -> Iterator[None]:
    """Keep this program's way to end on SIGTERM, which Ray replaces, and means to leave replaced."""
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


def _errand() -> Callable[..., tuple[str, Any]]:
    """Return what a node runs. It is made here so that it travels as code: the node may have no
    flatout, or another.
    """

    def errand(version: str, search_path: list[str], *rest: Any) -> tuple[str, Any]:
        import importlib
        import socket
        import sys

        sys.path.extend(entry for entry in search_path if entry not in sys.path)
        node = socket.gethostname()
        try:
            there = importlib.import_module("flatout").__version__
        except ImportError as error:
            return node, f"has no flatout ({error})"
        if there != version:
            return node, f"has flatout {there}, this machine {version}"
        return node, importlib.import_module("flatout.data.prepare.ray_workers").pack_here(*rest)

    return errand


def pack_here(folder: str, mark: str, work: bytes, setup: list[Any]) -> RangeRecord | Failure:
    """Pack a range on a node: from the caller's current folder, where there is one, into the work
    folder that has the mark.
    """
    if not Path(mark).exists():
        return Failure(
            f"It does not see the folder {Path(mark).parent}, or another one of that name.",
            "Give an --out on a disk that every node has under the same name.",
            RunFailed,
        )
    with contextlib.suppress(OSError):
        os.chdir(folder)

    def packed() -> RangeRecord:
        told = _setup(setup[0])
        return pack_range(pickle.loads(work), told.packing, told.folder, lambda _: None)()

    return attempt(packed)


@functools.lru_cache(maxsize=1)
def _setup(reference: Any) -> Setup:
    """Return what a process of a node is told once."""
    told: Setup = pickle.loads(ray_package().get(reference))
    return told
