import contextlib
import os
import signal
import threading
from concurrent.futures import CancelledError

import pytest

from flatout.storage.remote import parallel
from flatout.storage.remote.parallel import MAX_PARALLEL, transfer_all


class Counted:
    """A progress, and its only task."""

    def __init__(self):
        self.megabytes = 0.0

    def task(self, title, *, total, unit):
        return contextlib.nullcontext(self)

    def advance(self, amount=1.0):
        self.megabytes += amount

    def note(self, text):
        pass


def test_jobs_run_in_parallel_and_their_bytes_add_up():
    progress = Counted()
    together = threading.Barrier(MAX_PARALLEL)

    def job(advance):
        together.wait(60)
        for _ in range(100):
            advance(10_000)

    transfer_all("Sending", [job] * MAX_PARALLEL, 8_000_000, progress)
    assert progress.megabytes == pytest.approx(MAX_PARALLEL)


def test_an_interrupt_does_not_wait_for_a_silent_server(monkeypatch):
    monkeypatch.setattr(parallel, "INTERRUPTED_WAIT_S", 0.01)
    answers, begun = threading.Event(), []

    def silent(advance):
        begun.append(1)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        assert answers.wait(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            transfer_all("Sending", [silent] * 2, 2, Counted())
    finally:
        answers.set()


def test_the_first_failure_stops_the_other_jobs_and_is_raised():
    begun, ended = threading.Event(), []

    def endless(advance):
        begun.set()
        try:
            while True:
                advance(1)
        except CancelledError:
            ended.append(True)
            raise

    def failing(advance):
        begun.wait(60)
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        transfer_all("Sending", [endless, failing], 2, Counted())
    assert ended == [True]
