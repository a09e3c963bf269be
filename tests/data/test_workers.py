import os
import signal
import subprocess
import sys

import psutil
import pytest

from flatout.data import workers
from flatout.data.pack import ByHash, Job
from flatout.data.tokenizer import make_tokenizer
from flatout.data.workers import Setup, packed_in_order
from flatout.errors import DataError, RunFailed
from flatout.sources import BadRow, Part

SOURCE = """
import os, signal, time
from flatout.errors import DataError
from flatout.sources import BadRow

def numbered(first, count, wait=0.0):
    time.sleep(wait)
    for number in range(first, first + count):
        yield f"document {number} " * (number % 7 + 1)

def bad(name, wait):
    time.sleep(wait)
    yield BadRow(DataError(f"{name} is bad.", fix="Mend it."), "bad", name)

def dies():
    os.kill(os.getpid(), signal.SIGKILL)
    yield "never"

def breaks():
    yield "one"
    raise ZeroDivisionError("broken source")

def tells_process():
    yield str(os.getpid())

def sleeps():
    time.sleep(600)
    yield "never"
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A module that workers can import, as a user's own would be."""
    (tmp_path / "worker_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import worker_source

    yield worker_source
    sys.modules.pop("worker_source")


@pytest.fixture
def setup():
    return Setup(make_tokenizer("byte", lambda limit: ()), ByHash(0.3), "raise")


def content(jobs, setup, count):
    return [
        (packed.documents, {name: (split.tokens.tobytes(), split.ends.tolist()) for name, split in packed.splits.items()})
        for packed in packed_in_order(jobs, setup, count)
    ]


def test_any_number_of_workers_gives_the_same_in_order(source, setup):
    jobs = [Job(Part(source.numbered, (index * 10, index % 4, 0.02 * (index % 3)), "x")) for index in range(17)]
    alone = content(jobs, setup, 1)
    assert len(alone) == 17
    assert content(jobs, setup, 2) == alone
    assert content(jobs, setup, 5) == alone


def test_the_work_is_done_in_other_processes(source, setup):
    jobs = [Job(Part(source.tells_process, (), "x")) for _ in range(6)]
    said = {bytes(packed.splits[name].tokens[:-1].astype("u1")) for packed in packed_in_order(jobs, setup, 2) for name in packed.splits}
    assert str(os.getpid()).encode() not in said
    assert len(said - {b""}) in (1, 2)


def test_the_first_bad_row_in_the_order_of_the_jobs_is_the_one_raised(source, setup):
    jobs = [Job(Part(source.bad, ("late", 0.3), "x")), Job(Part(source.bad, ("early", 0.0), "y"))]
    for count in (1, 2):
        with pytest.raises(DataError, match="late is bad") as caught:
            list(packed_in_order(jobs, setup, count))
        assert caught.value.fix == "Mend it."


def test_a_worker_that_is_killed_is_said(source, setup):
    jobs = [Job(Part(source.numbered, (0, 3), "x")), Job(Part(source.dies, (), "y")), Job(Part(source.numbered, (0, 3), "z"))]
    with pytest.raises(RunFailed, match=r"killed by signal 9.*--workers"):
        list(packed_in_order(jobs, setup, 2))


def test_an_error_in_a_users_source_is_shown_with_its_traceback(source, setup):
    jobs = [Job(Part(source.breaks, (), "x"))] * 2
    with pytest.raises(RunFailed, match="broken source") as caught:
        list(packed_in_order(jobs, setup, 2))
    assert "worker_source.py" in "".join(caught.value.__notes__)


def test_what_waits_for_an_earlier_result_is_bounded(source, setup, monkeypatch):
    given = []
    send = workers._send
    monkeypatch.setattr(workers, "_send", lambda worker, message: (given.append(message), send(worker, message)))
    jobs = [Job(Part(source.numbered, (0, 1, 0.5 if index == 0 else 0.0), "x")) for index in range(40)]
    results = packed_in_order(jobs, setup, 2)
    next(results)
    numbers = [message[0] for message in given if isinstance(message, tuple)]
    assert max(numbers) < workers.AHEAD * 2 + 1
    results.close()


def test_no_process_is_left_when_the_caller_stops_early(source, setup):
    before = {child.pid for child in psutil.Process().children()}
    jobs = [Job(Part(source.numbered, (0, 1), "x"))] + [Job(Part(source.sleeps, (), "y"))] * 3
    results = packed_in_order(jobs, setup, 2)
    next(results)
    started = {child.pid for child in psutil.Process().children()} - before
    assert len(started) == 2
    results.close()
    assert not started & {child.pid for child in psutil.Process().children()}


def test_workers_end_when_the_caller_is_killed(tmp_path, source):
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys; sys.path[:] = " + repr(sys.path) + "\n"
        "import worker_source as source\n"
        "from flatout.data.pack import ByHash, Job\n"
        "from flatout.data.tokenizer import make_tokenizer\n"
        "from flatout.data.workers import Setup, packed_in_order\n"
        "from flatout.sources import Part\n"
        "setup = Setup(make_tokenizer('byte', lambda limit: ()), ByHash(0.3), 'raise')\n"
        "results = packed_in_order([Job(Part(source.numbered, (0, 1), 'x'))] * 4, setup, 2)\n"
        "next(results); print('ready', flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout.readline() == "ready\n", "a script without a main guard works"
        children = psutil.Process(caller.pid).children()
        assert len(children) == 2
        caller.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_bad_rows_travel(source, setup):
    jobs = [Job(Part(source.bad, (f"row {index}", 0.0), "x")) for index in range(4)]
    results = list(packed_in_order(jobs, Setup(setup.tokenizer, setup.assignment, "skip"), 2))
    assert [packed.skipped.first for packed in results] == [{"bad": [f"row {index}"]} for index in range(4)]
    assert isinstance(next(iter(jobs[0].rows())), BadRow)
