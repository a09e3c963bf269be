import threading
from concurrent.futures import CancelledError

import pytest

from flatout.transfer.parallel import MAX_PARALLEL, Transfers


class Counted:
    def __init__(self):
        self.megabytes = 0.0

    def advance(self, amount=1.0):
        self.megabytes += amount

    def note(self, text):
        pass


def test_jobs_run_in_parallel_and_their_bytes_add_up():
    task = Counted()
    transfers = Transfers(task)
    together = threading.Barrier(MAX_PARALLEL)

    def job():
        together.wait(60)
        for _ in range(100):
            transfers.advance(10_000)

    transfers.run([job] * MAX_PARALLEL)
    assert task.megabytes == pytest.approx(MAX_PARALLEL)


def test_the_first_failure_stops_the_other_jobs_and_is_raised():
    transfers = Transfers(Counted())
    begun, ended = threading.Event(), []

    def endless():
        begun.set()
        try:
            while True:
                transfers.advance(1)
        except CancelledError:
            ended.append(True)
            raise

    def failing():
        begun.wait(60)
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        transfers.run([endless, failing])
    assert ended == [True]
