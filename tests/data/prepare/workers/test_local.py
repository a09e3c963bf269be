import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from corpora import work_items

from flatout.data.prepare.pack.range_files import read_records
from flatout.data.prepare.pack.tokenize import Packing
from flatout.data.prepare.pipeline import Options
from flatout.data.prepare.workers import local as local_workers
from flatout.data.prepare.workers.local import LocalWorkers
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError, RunFailed

pytestmark = pytest.mark.slow

SOURCE = """
import os, signal, time
from flatout.errors import DataError
from flatout.data.sources import BadRow

def numbered(first, count, wait=0.0):
    time.sleep(wait)
    for number in range(first, first + count):
        yield f"document {number} " * (number % 7 + 1)

def bad(name, wait):
    time.sleep(wait)
    yield BadRow("is bad", "Mend it.", "bad", name)

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
    """A module that workers can import, like a user's source."""
    (tmp_path / "worker_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import worker_source

    yield worker_source
    sys.modules.pop("worker_source")


@pytest.fixture
def packing(tmp_path):
    for name in ("ranges", "dataset"):
        (tmp_path / name).mkdir()
    return Packing(make_tokenizer("byte", lambda limit: ()), Options(), tmp_path)


def files_of(packing):
    """Return the files of all ranges."""
    return [path for path in packing.folder.glob("*/*") if path.suffix in (".bin", ".json")]


def pack(work, packing, count, tell=lambda _: None):
    with LocalWorkers(count) as crew:
        return list(crew.pack(work, packing, tell))


def content(work, packing, count):
    """Return the contents of all files, and remove them."""
    assert [record.number for record in pack(work, packing, count)] == list(range(len(work)))
    held = {path.name: path.read_bytes() for path in files_of(packing)}
    for path in files_of(packing):
        path.unlink()
    return held


def test_any_number_of_workers_writes_the_same_files(source, packing):
    work = work_items(
        *[(source.numbered, index * 10, index % 4, 0.02 * (index % 3)) for index in range(17)]
    )
    alone = content(work, packing, 1)
    assert sum(name.endswith(".json") for name in alone) == 17
    assert content(work, packing, 2) == alone
    assert content(work, packing, 5) == alone


@pytest.mark.parametrize("loaded", ["the same", "a different one"])
def test_workers_that_have_loaded_a_tokenizer_write_the_same_files(source, packing, loaded):
    work = work_items(*[(source.numbered, index * 10, 4) for index in range(5)])
    alone = content(work, packing, 1)
    other = make_tokenizer("char", lambda limit: ["document 0123456789 "])
    with LocalWorkers(2) as crew:
        crew.load(packing.tokenizer if loaded == "the same" else other)
        list(crew.pack(work, packing))
    assert {path.name: path.read_bytes() for path in files_of(packing)} == alone


def test_workers_end_that_have_only_loaded_a_tokenizer(packing):
    large = make_tokenizer("ids:100000", lambda limit: ())  # more than a socket takes at once
    with LocalWorkers(2) as crew:
        crew.load(large)
        process = crew._workers[0].process
    assert process.returncode is not None


def test_the_first_bad_row_in_range_order_is_raised(source, packing):
    work = work_items((source.bad, "late", 0.3), (source.bad, "early", 0.0))
    for count in (1, 2):
        with pytest.raises(DataError, match="late is bad") as caught:
            pack(work, packing, count)
        assert caught.value.fix == "Mend it."
    assert files_of(packing) == []


def test_ranges_before_a_bad_row_are_recorded(source, packing):
    with pytest.raises(DataError, match="row is bad"):
        pack(
            work_items(
                (source.numbered, 0, 3, 0.2), (source.bad, "row", 0.0), (source.numbered, 0, 3)
            ),
            packing,
            2,
        )
    assert read_records(packing.folder / "ranges")[0].documents == 3


def test_a_killed_worker_is_reported(source, packing):
    work = work_items((source.numbered, 0, 3), (source.dies,), (source.numbered, 0, 3))
    with pytest.raises(
        RunFailed, match=r"killed by signal 9.*it continues where it stopped.*--workers"
    ):
        pack(work, packing, 2)


def test_an_error_in_a_users_source_is_shown_with_its_traceback(source, packing):
    with pytest.raises(RunFailed, match="broken source") as caught:
        pack(work_items((source.breaks,), (source.breaks,)), packing, 2)
    assert "worker_source.py" in "".join(caught.value.__notes__)
    assert files_of(packing) == [], "no unfinished files"


def test_an_unwritable_disk_is_reported_alike_by_any_process(source, packing):
    gone = replace(packing, folder=packing.folder / "gone")
    for count in (1, 2):
        with pytest.raises(DataError, match=r"Cannot write .*: No such file"):
            pack(work_items((source.numbered, 0, 3), (source.numbered, 0, 3)), gone, count)


def test_the_queue_of_each_worker_is_bounded(source, packing, monkeypatch):
    held = []
    send = local_workers._Worker.send
    monkeypatch.setattr(
        local_workers._Worker,
        "send",
        lambda worker, message: (held.append(worker.held), send(worker, message)),
    )
    with LocalWorkers(2) as crew:
        assert len(list(crew.pack(work_items(*[(source.numbered, 0, 1)] * 40), packing))) == 40
    assert max(held) == local_workers.QUEUED


def test_no_process_is_left_when_the_caller_stops_early(source, packing):
    before = {*psutil.Process().children(recursive=True)}
    with LocalWorkers(2) as crew:
        next(crew.pack(work_items((source.numbered, 0, 1), *[(source.sleeps,)] * 3), packing))
        started = {*psutil.Process().children(recursive=True)} - before
        assert len(started) == 3, "two workers and their parent"
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


def test_one_worker_packs_in_this_process():
    before = {child.pid for child in psutil.Process().children()}
    with LocalWorkers(1):
        assert {child.pid for child in psutil.Process().children()} == before


def test_workers_end_when_the_caller_is_killed(tmp_path, source, packing):
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys; sys.path[:] = " + repr(sys.path) + "\n"
        "from pathlib import Path\n"
        "import worker_source as source\n"
        "from corpora import work_items\n"
        "from flatout.data.prepare.pack.tokenize import Packing\n"
        "from flatout.data.prepare.pipeline import Options\n"
        "from flatout.data.prepare.workers.local import LocalWorkers\n"
        "from flatout.data.tokenizers.make import of_bytes\n"
        f"packing = Packing(of_bytes(), Options(), Path({str(packing.folder)!r}))\n"
        "items = work_items(*[(source.numbered, 0, 1)] * 4)\n"
        "packed = LocalWorkers(2).pack(items, packing)\n"
        "next(packed); print('ready', flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout.readline() == "ready\n", "a script without a main guard works"
        children = psutil.Process(caller.pid).children(recursive=True)
        assert len(children) == 3, "two workers and their parent"
        caller.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_workers_leave_signals_to_the_caller(source, packing):
    """A scheduler may send them to every process of a job."""
    with LocalWorkers(2) as workers:
        found = workers.pack(work_items(*[(source.numbered, n, 1, 0.1) for n in range(6)]), packing)
        records = [next(found)]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.killpg(workers._workers[0].process.pid, number)
        records += found
    assert len(records) == 6


def test_bad_rows_and_progress_reach_the_caller(source, packing):
    skipping = replace(packing, options=Options(on_bad_row="skip"))
    reports = []
    records = pack(
        work_items(*[(source.bad, f"row {index}", 0.0) for index in range(4)]),
        skipping,
        2,
        reports.append,
    )
    assert [(entry.reason, entry.first) for record in records for entry in record.skipped] == [
        ("bad", (f"row {index}",)) for index in range(4)
    ]
    assert [record.bad_rows for record in records] == [1] * 4
    assert len(reports) == 4
