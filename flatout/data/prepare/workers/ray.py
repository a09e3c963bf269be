"""Workers on a Ray cluster, whose nodes write ranges into one shared work directory.

Each range is a Ray task that returns the range's record. If its process or node dies, the range is
packed again elsewhere, under different temporary names, so that two attempts do not damage each
other's files.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from flatout.data.prepare.pack.range_files import RangeRecord
from flatout.data.prepare.pack.tokenize import Packing, Report, Tally, pack_range
from flatout.data.prepare.pack.work_items import WorkItem
from flatout.data.prepare.workers.local import (
    RESUMES,
    Answer,
    WorkerFailed,
    attempt,
    in_order,
)
from flatout.data.tokenizers import Tokenizer
from flatout.errors import FlatoutError, MissingPackage, RunFailed
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import PART, Unfinished

RETRIES = 3
"""Number of times that a range is packed again when its process or node dies."""
QUEUED = 2
"""Ranges per CPU of the cluster: the one being packed, and the next."""
WAIT_S = 1.0
"""Seconds to wait for a range before counting the CPUs of the cluster again."""


def ray_package() -> ModuleType:
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

    `limit` bounds the ranges packed at a time. None uses all CPUs of the cluster.
    """

    def __init__(self, limit: int | None = None, *, progress: Progress = SILENT) -> None:
        self._ray = ray_package()
        self._limit = limit
        self._progress = progress
        self._running: dict[Any, WorkItem] = {}
        self._context = contextlib.ExitStack()
        self._cluster = (0, 0)
        self._counted_at = 0.0

    def load(self, tokenizer: Tokenizer) -> None:
        """Do nothing: each node loads it with the ranges."""

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            with contextlib.ExitStack() as context:
                # Ray prints about dead processes. Our standard output may be read by a tool
                context.enter_context(contextlib.redirect_stdout(sys.stderr))
                context.callback(self._ray.shutdown)
                handler = signal.getsignal(signal.SIGTERM)
                try:
                    with self._progress.task("Connecting to Ray"):
                        self._ray.init(
                            include_dashboard=False, log_to_driver=False, logging_level="ERROR"
                        )
                except Exception as error:
                    raise RunFailed(
                        f"Cannot connect to Ray: {' '.join(str(error).split())}",
                        fix="Check RAY_ADDRESS, and the cluster with `ray status`.",
                    ) from error
                finally:  # Ray replaces the handler for good
                    if threading.current_thread() is threading.main_thread():
                        signal.signal(signal.SIGTERM, handler)
                self._context = context.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._context:
            self._stop()

    def pack(
        self, items: Sequence[WorkItem], packing: Packing, report: Report = lambda _: None
    ) -> Iterator[RangeRecord]:
        """Pack the items on the cluster and yield the records of their ranges in order.

        Raises: DataError for the first bad row in the order of the items; RunFailed when the
                cluster fails.
        """
        mark = packing.folder / f"{uuid.uuid4().hex}{PART}"
        mark.touch()
        environment = (_version(), sys.path, os.getcwd(), str(mark))
        sent = [self._ray.put(pickle.dumps(packing))]
        task = self._ray.remote(num_cpus=1, max_retries=RETRIES)(_remote_function())

        def submit(waiting: deque[WorkItem]) -> None:
            room = self._limit or max(1, QUEUED * self._cpus())
            while waiting and len(self._running) < room:
                item = waiting.popleft()
                # A node unpickles the item only after checking that the versions are equal.
                reference = task.remote(*environment, pickle.dumps(item), sent)
                self._running[reference] = item

        try:
            yield from in_order(items, submit, lambda: self._collect(report))
        finally:
            self._stop()
            mark.unlink(missing_ok=True)

    def _collect(self, report: Report) -> list[Answer]:
        """Wait up to `WAIT_S` for ranges to finish, and return their results."""
        ready, _ = self._ray.wait(list(self._running), timeout=WAIT_S)
        ended = []
        for reference in ready:
            item = self._running.pop(reference)
            result = self._result(reference, item)
            if isinstance(result, RangeRecord):
                report(Tally(result.num_bytes, result.documents, result.tokens))
            ended.append((item.number, result))
        return ended

    def _result(self, reference: Any, item: WorkItem) -> RangeRecord | FlatoutError:
        """Return the record, or the error, which names the node."""
        exceptions = self._ray.exceptions
        result: RangeRecord | FlatoutError | str
        try:
            node, result = self._ray.get(reference)
        except exceptions.RayTaskError as error:
            return RunFailed(
                f"Ray could not run prepare's task: {error}",
                fix="Check that the nodes have the packages of this machine.",
            )
        except exceptions.RayError as error:
            why = str(error).partition("\n")[0].rstrip(".")
            return RunFailed(
                f"The Ray cluster gave up on range {item.number}, which it tried "
                f"{RETRIES + 1} times: {why}.",
                fix=f"{RESUMES} The usual cause is too little memory: use fewer --workers.",
            )
        if isinstance(result, str):
            return RunFailed(
                f"The node {node} {result}.",
                fix=f"Install flatout {_version()} on every node, as on this machine.",
            )
        if isinstance(result, RangeRecord | Unfinished | WorkerFailed):
            return result
        return type(result)(f"On the node {node}: {result.what}", fix=result.fix)

    def _cpus(self) -> int:
        """Return the number of CPUs of the cluster, counted every second. Report a change."""
        if time.monotonic() - self._counted_at < WAIT_S:
            return self._cluster[1]
        self._counted_at = time.monotonic()
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        nodes, cpus = len(alive), int(sum(resources.get("CPU", 0) for resources in alive))
        if (nodes, cpus) != self._cluster:
            self._cluster = nodes, cpus
            self._progress.say(f"CPUs of the Ray cluster: {cpus}, on {counted(nodes, 'node')}.")
        return cpus

    def _stop(self) -> None:
        """Cancel running tasks and wait until their processes end, so that none still writes."""
        if self._running and self._ray.is_initialized():
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=10)
        self._running.clear()


def _version() -> str:
    return str(importlib.import_module("flatout").__version__)


def _remote_function() -> Callable[..., tuple[str, Any]]:
    """Return the function that a node runs.

    It is defined here so that Ray sends its code: the node may have a different version of flatout,
    or none.
    """

    def run(version: str, search_path: list[str], *rest: Any) -> tuple[str, Any]:
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
            return node, f"has flatout {there}, and this machine has {version}"
        module = importlib.import_module("flatout.data.prepare.workers.ray")
        return node, module.pack_here(*rest)

    return run


def pack_here(
    directory: str, mark: str, work: bytes, packing: list[Any]
) -> RangeRecord | FlatoutError:
    """Pack a range on a node, in the caller's current directory if it exists there.

    The work directory must contain the mark, which shows that the node sees the same disk.
    """
    if not Path(mark).exists():
        return RunFailed(
            f"It does not see the directory {Path(mark).parent}, or sees a different one with that "
            "name.",
            fix="Choose an --out on a disk that every node sees under the same name.",
        )
    with contextlib.suppress(OSError):
        os.chdir(directory)

    return attempt(
        lambda: pack_range(pickle.loads(work), _packing(packing[0]))(),
        f"A worker of prepare failed on the node {socket.gethostname()}",
        "--engine local --workers 1 shows the traceback.",
    )


@lru_cache(maxsize=1)
def _packing(reference: Any) -> Packing:
    """Return the packing, which a node's process fetches once."""
    packing: Packing = pickle.loads(importlib.import_module("ray").get(reference))
    return packing
