"""Ray tasks: send ranges to nodes, and interpret their results on this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.data.prepare.pack.jobs import Range
from flatout.data.prepare.pack.range_files import pack_range
from flatout.data.prepare.pack.records import RangeRecord
from flatout.data.prepare.workers.protocol import RESUMES, Failure, Setup, attempt
from flatout.errors import DataError, RunFailed
from flatout.files import Unfinished

RETRIES = 3
"""Number of times that a range is packed again when its process or node dies."""


class RayTasks:
    """Submits ranges to a cluster, and interprets the results."""

    def __init__(self, ray: Any, setup: Setup, mark: Path) -> None:
        self._ray = ray
        self._setup = setup
        self._reference = ray.put(pickle.dumps(setup))
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(_remote_function())
        self._environment = (_version(), sys.path, os.getcwd(), str(mark))

    def submit(self, work: Range) -> Any:
        """Submit a range, and return the reference of its task.

        A node unpickles the range only after checking that the versions are equal.
        """
        return self._task.remote(*self._environment, pickle.dumps(work), [self._reference])

    def result(self, reference: Any, work: Range) -> RangeRecord | Failure:
        """Return the record, or the failure as this machine reports it."""
        exceptions = self._ray.exceptions
        try:
            node, result = self._ray.get(reference)
        except exceptions.RayTaskError as error:
            return Failure(
                f"Ray could not run prepare's task: {error}",
                "Check that the nodes have the packages of this machine.",
                RunFailed,
            )
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError) as error:
            return Failure(
                f"The process that packed range {work.number} died {RETRIES + 1} times: "
                f"{_first_line(error)}",
                f"{RESUMES} The usual cause is too little memory: use fewer --workers.",
                RunFailed,
            )
        except exceptions.RayError as error:
            return Failure(
                f"The Ray cluster gave up on range {work.number}: {_first_line(error)}",
                RESUMES,
                RunFailed,
            )
        if isinstance(result, str):
            return Failure(
                f"The node {node} {result}.",
                f"Install flatout {_version()} on every node, as on this machine.",
                RunFailed,
            )
        return self._explained(result, node, work) if isinstance(result, Failure) else result

    def _explained(self, failure: Failure, node: str, work: Range) -> Failure:
        """Return a node's failure as this machine's if packing fails here too, else as its own."""
        if failure.kind is None:
            return replace(
                failure,
                what=f"A worker of prepare failed on the node {node}: {failure.what}.",
                fix="--engine local --workers 1 shows the traceback.",
                kind=RunFailed,
            )
        if failure.kind is DataError:
            here = attempt(lambda: pack_range(work, self._setup.packing, self._setup.folder)())
            if isinstance(here, Failure):
                return here
            return Failure(
                f"The node {node} cannot do what this machine can: {failure.what}",
                "Name sources that every node can read.",
                RunFailed,
            )
        if failure.kind is Unfinished:
            return failure
        return replace(failure, what=f"On the node {node}: {failure.what}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") + "."


def _version() -> str:
    return str(importlib.import_module("flatout").__version__)


def _remote_function() -> Callable[..., tuple[str, Any]]:
    """Return the function that a node runs.

    It is defined here so that Ray sends its code: the node may have another version of flatout, or
    none.
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
            return node, f"has flatout {there}, and this machine {version}"
        module = importlib.import_module("flatout.data.prepare.workers.ray_tasks")
        return node, module.pack_here(*rest)

    return run


def pack_here(directory: str, mark: str, work: bytes, setup: list[Any]) -> RangeRecord | Failure:
    """Pack a range on a node, in the caller's current directory if it exists there.

    The work directory must contain the mark, which shows that the node sees the same disk.
    """
    if not Path(mark).exists():
        return Failure(
            f"It does not see the directory {Path(mark).parent}, or sees another one with that "
            "name.",
            "Choose an --out on a disk that every node sees under the same name.",
            RunFailed,
        )
    with contextlib.suppress(OSError):
        os.chdir(directory)

    def pack() -> RangeRecord:
        sent = _setup(setup[0])
        return pack_range(pickle.loads(work), sent.packing, sent.folder)()

    return attempt(pack)


@functools.lru_cache(maxsize=1)
def _setup(reference: Any) -> Setup:
    """Return the setup, which a node's process fetches once."""
    setup: Setup = pickle.loads(importlib.import_module("ray").get(reference))
    return setup
