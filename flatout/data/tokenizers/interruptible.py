"""Native work in a thread, so that a signal interrupts the caller meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from threading import Event, Thread

STOP_S = 1.0
"""How long an interrupted caller waits for the thread to notice.

A thread of native code that calls Python while the interpreter shuts down can abort the process.
"""


def interruptibly(work: Callable[[Iterator[str]], object], texts: Iterable[str]) -> None:
    """Call `work(texts)` in a thread and wait for it.

    Python handles signals between the instructions of the main thread, so native code in that
    thread delays them until it returns. After an interruption the texts end with an error, and the
    thread computes on until it needs one or the process ends.

    Raises: the error of `work`.
    """
    done: Future[None] = Future()
    stopped = Event()

    def until_stopped() -> Iterator[str]:
        for text in texts:
            if stopped.is_set():
                raise CancelledError
            yield text

    def run() -> None:
        try:
            work(until_stopped())
            done.set_result(None)
        except BaseException as error:  # raised in the caller
            done.set_exception(error)

    try:
        Thread(target=run, name="flatout-native", daemon=True).start()
        done.result()
    except BaseException:
        stopped.set()
        wait([done], timeout=STOP_S)
        raise
