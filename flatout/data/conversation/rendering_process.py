"""Renders chat templates in separate processes, with limits of time, memory and output.

A template comes with a tokenizer from elsewhere, and it is a program: text of any length is a
short expression in it. One process for each template serves all its conversations.
"""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

from flatout.errors import DataError
from flatout.storage.process_limits import failure_of

if TYPE_CHECKING:
    from flatout.data.conversation.jinja import Asked

CPU_S = 10
"""CPU time of one call. Most conversations take less than a millisecond."""
MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 24
"""Characters that a template may write: twice as many as the longest row has."""
_BOOT = (
    "import signal; [signal.signal(n, signal.SIG_IGN) for n in {signals}]; "
    "import sys; sys.path[:] = {path!r}; from flatout.data.conversation.jinja import serve; "
    "serve({descriptor})"
)


class Refused(Exception):
    """The template itself rejects a conversation, in its own words."""


class Rendered(NamedTuple):
    """A text, and how others compare with it."""

    text: str
    shared: list[tuple[int, int]]
    """Of each other text, its length and the number of characters at the start of both."""


def message(values: dict[str, Any], asked: Sequence[Asked]) -> bytes:
    """Return a request for texts of `values["messages"]`."""
    return pickle.dumps((values, asked))


def render(
    name: str, template: str, requests: Sequence[bytes]
) -> Iterator[list[Rendered] | Refused | DataError]:
    """Yield the texts that a template makes for each request, or the error, which names it `name`.

    An error is Refused with the template's own words; DataError when the template cannot be parsed,
    fails, or exceeds a limit. The limits are those of one call. A call that exceeds them is
    repeated request by request.
    """
    answers = _process(template).ask(requests)
    if len(requests) > 1 and any("fails" in answer for answer in answers):
        for one in requests:
            yield from render(name, template, [one])
        return
    for answer in answers:
        if "refuses" in answer:
            yield Refused(answer["refuses"])
        elif "fails" in answer:
            where = f", line {answer['line']}," if answer.get("line") else ""
            yield DataError(
                f"The chat template {name}{where} fails: {answer['fails']}.",
                fix="Correct it, or use a different one: --chat chatml, --chat plain or --chat "
                "FILE.",
            )
        else:
            yield [Rendered(text, shared) for text, shared in answer["rendered"]]


class _Process:
    """A process that renders one template. It starts at the first request, and again after one
    that ended it.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self._connection: Connection | None = None
        self._lock = Lock()

    def ask(self, requests: Sequence[bytes]) -> list[dict[str, Any]]:
        """Return the answers to some requests. A single one when they end the process."""
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.send(requests)
                return json.loads(connection.recv_bytes())  # type: ignore[no-any-return]
            except (EOFError, OSError):
                self._connection = None
                return [{"fails": f"it {failure_of(self._end() or 0)}"}]
            except BaseException:  # the answer would be taken for that to the next requests
                self._connection = None
                self._end()
                raise

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            signals = [int(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
            boot = _BOOT.format(path=sys.path, descriptor=theirs.fileno(), signals=signals)
            process = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._connection = Connection(ours.detach())
        self._end = finalize(self, _end, process, self._connection)
        self._connection.send((self._template, MEMORY_BYTES, CPU_S, MOST_CHARACTERS))
        return self._connection


def _end(process: subprocess.Popen[bytes], connection: Connection) -> int:
    """End a process, and return its exit code."""
    connection.close()
    process.kill()
    return process.wait()


@lru_cache(maxsize=8)
def _process(template: str) -> _Process:
    return _Process(template)
