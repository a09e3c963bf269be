"""The Ray workers, with a stand-in for the package ray.

`test_workers_ray_cluster.py` uses a real cluster.
"""

import itertools
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from corpora import work_items
from prepared import write_rows

from flatout.data.prepare.pack.tokenize import Packing
from flatout.data.prepare.pipeline import Options, engine_named, prepare_dataset
from flatout.data.prepare.workers import ray as ray_workers
from flatout.data.prepare.workers.local import LocalWorkers
from flatout.data.prepare.workers.ray import RayWorkers
from flatout.data.sources import BadRow
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import ConfigError, DataError, Interrupted, MissingPackage, RunFailed
from flatout.storage.files import Unfinished

NUMBERS = itertools.count()


class StandIn:
    """The part of the package ray that is used: a task runs when its result is requested.

    `ends` chooses the running task that ends next.
    """

    def __init__(self, cpus, address):
        self.cpus = cpus
        self.most = self.waiting = 0
        self.ends = lambda references: references[0]
        self.cancelled = []
        self.exceptions = SimpleNamespace(
            **{
                name: type(name, (RayError,), {})
                for name in ("RayTaskError", "WorkerCrashedError", "OutOfMemoryError")
            },
            RayError=RayError,
        )
        self._address = address
        self._calls = {}

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address=self._address)

    def nodes(self):
        gone = {"Alive": False, "Resources": {"CPU": 64.0}}
        return [
            gone,
            *[{"Alive": True, "Resources": {"CPU": 1.0} if cpu else {}} for cpu in self.cpus],
        ]

    def put(self, value):
        reference = next(NUMBERS)
        self._calls[reference] = lambda: value
        return reference

    def remote(self, **options):
        assert options == {"num_cpus": 1, "max_retries": ray_workers.RETRIES}
        return lambda function: SimpleNamespace(
            remote=lambda *arguments: self._begun(function, arguments)
        )

    def _begun(self, function, arguments):
        reference = next(NUMBERS)
        self._calls[reference] = lambda: function(*arguments)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return reference

    def wait(self, references, *, timeout, num_returns=1):
        return ([self.ends(references)], []) if any(self.cpus) else ([], references)

    def get(self, reference):
        self.waiting -= 1
        return self._calls[reference]()

    def cancel(self, reference, *, force):
        self.cancelled.append(reference)


class RayError(Exception):
    pass


@pytest.fixture
def ray(monkeypatch):
    """A cluster of two nodes with a CPU each, and a head node that answers."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        standing = StandIn([1, 1], f"127.0.0.1:{head.getsockname()[1]}")
        monkeypatch.setitem(sys.modules, "ray", standing)
        yield standing


@pytest.fixture
def packing(tmp_path):
    for name in ("ranges", "dataset"):
        (tmp_path / name).mkdir()
    return Packing(make_tokenizer("byte", lambda limit: ()), Options(), tmp_path)


def numbered(first):
    yield from (f"document {number}" for number in range(first, first + 3))


def bad(name):
    yield BadRow("is bad", "Mend it.", "bad", name)


def breaks():
    yield 1 / 0


def lacks():
    raise MissingPackage("It takes a package.", fix="Install it.")
    yield


def fills():
    raise Unfinished("The disk is full.", fix="Make room.")
    yield


def bad_the_first_time(tries):
    with open(tries, "a") as file:
        file.write("x")
        first = file.tell() == 1
    yield from bad("here") if first else numbered(0)


def files_of(packing):
    """Return the files of all ranges."""
    return [path for path in packing.folder.glob("*/*") if path.suffix in (".bin", ".json")]


def pack(work, packing, limit=None):
    with RayWorkers(limit) as crew:
        return list(crew.pack(work, packing))


def test_records_come_in_order_and_files_equal_those_of_local_workers(ray, packing):
    ray.ends = lambda references: references[-1]
    work = work_items(*[(numbered, index) for index in range(20)])
    assert [record.number for record in pack(work, packing)] == list(range(20))
    on_ray = {path.name: path.read_bytes() for path in files_of(packing)}
    with LocalWorkers(1) as crew:
        list(crew.pack(work, packing))
    assert on_ray == {path.name: path.read_bytes() for path in files_of(packing)}


@pytest.mark.parametrize(("limit", "most"), [(None, 2 * ray_workers.QUEUED), (3, 3), (1, 1)])
def test_submitted_ranges_are_bounded_by_the_cluster_or_the_limit(ray, packing, limit, most):
    pack(work_items(*[(numbered, index) for index in range(20)]), packing, limit)
    assert ray.most == most


def test_progress_reports_what_was_done(ray, packing):
    reports = []
    with RayWorkers() as crew:
        records = list(crew.pack(work_items((numbered, 0), (numbered, 3)), packing, reports.append))
    assert [(tally.documents, tally.tokens) for tally in reports] == [
        (3, record.tokens) for record in records
    ]


def test_the_first_bad_row_in_range_order_is_raised_and_the_rest_cancelled(ray, packing):
    ray.ends = lambda references: references[-1]
    with pytest.raises(DataError, match="late is bad"):
        pack(work_items((numbered, 0), (bad, "late"), (bad, "early"), (numbered, 0)), packing)
    assert sorted(path.name for path in packing.folder.glob("ranges/*.json")) == [
        "000000.json",
        "000003.json",
    ]
    ray.ends = lambda references: references[0]
    with RayWorkers() as crew:
        next(crew.pack(work_items((numbered, 0), (numbered, 1), (numbered, 2)), packing))
    assert len(ray.cancelled) == 2
    assert not list(packing.folder.glob("*/*.part"))


def test_an_error_of_one_node_alone_is_reported_as_its_own(ray, packing, tmp_path):
    with pytest.raises(
        RunFailed,
        match=r"The node .* cannot do what this machine can: here is bad\. Fix: Name sources "
        r"that every node can read",
    ):
        pack(work_items((bad_the_first_time, str(tmp_path / "tries"))), packing)


def test_errors_on_a_node_are_named_with_it(ray, packing):
    with pytest.raises(
        RunFailed, match=r"failed on the node .*: ZeroDivisionError.*--engine local --workers 1"
    ) as caught:
        pack(work_items((breaks,)), packing)
    assert "in breaks" in "".join(caught.value.__notes__)
    with pytest.raises(
        MissingPackage, match=r"On the node .*: It takes a package\. Fix: Install it\."
    ):
        pack(work_items((lacks,)), packing)
    with pytest.raises(Unfinished, match=r"^The disk is full\."):
        pack(work_items((fills,)), packing)


def test_ray_failures_are_explained(ray, packing):
    for name, words in {
        "WorkerCrashedError": r"packed range 0 died 4 times: Gone\..*it continues where it "
        r"stopped.*fewer --workers",
        "RayTaskError": r"could not run prepare's task",
        "RayError": r"gave up on range 0: Gone\. Fix: Run the same",
    }.items():
        kind = getattr(ray.exceptions, name)
        ray._begun = lambda function, arguments, kind=kind: (
            ray.put(None) if ray._calls.update({-1: lambda: raised(kind)}) else -1
        )
        with pytest.raises(RunFailed, match=words):
            pack(work_items((numbered, 0)), packing)


def raised(kind):
    raise kind("Gone.\nMore.")


def test_another_version_on_a_node_is_reported(ray, packing, monkeypatch):
    monkeypatch.setattr(ray_workers, "_version", lambda: "9.9")
    with pytest.raises(
        RunFailed,
        match=r"The node .* has flatout .*, and this machine has 9\.9.*Install flatout 9\.9 on "
        r"every node",
    ):
        pack(work_items((numbered, 0)), packing)


def test_a_node_that_does_not_see_the_work_directory_is_reported(ray, packing, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda path: None)
    with pytest.raises(
        RunFailed,
        match=r"On the node .*: It does not see the directory .*--out on a disk that "
        r"every node sees",
    ):
        pack(work_items((numbered, 0)), packing)
    assert not files_of(packing)


def refuse(*_, **__):
    raise ConnectionRefusedError


def test_a_lost_cluster_is_given_up_after_a_while(ray, packing, monkeypatch):
    monkeypatch.setattr(ray_workers, "WAIT_S", 0.01)
    ray.cpus = [0]
    monkeypatch.setattr(ray_workers, "NODE_PATIENCE_S", 0.05)
    with pytest.raises(
        RunFailed,
        match=r"No node of the Ray cluster has a CPU\. Fix: Start nodes\. .*it "
        r"continues where it stopped",
    ):
        pack(work_items((numbered, 0)), packing)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(ray_workers, "HEAD_PATIENCE_S", 0.05)
    with pytest.raises(
        RunFailed,
        match=r"The head node of the Ray cluster is gone\. .*it continues where it stopped",
    ):
        pack(work_items((numbered, 0)), packing)


def test_a_faulty_node_keeps_the_work_of_others(ray, tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", (f"row {number}" for number in range(50)))
    (tmp_path / "valid.txt").write_text("held out")
    options = Options(tokenizer="byte", val=(str(tmp_path / "valid.txt"),))
    with monkeypatch.context() as patch:
        patch.setattr(
            ray_workers,
            "pack_here",
            lambda *_: RunFailed("It does not see the folder.", fix="Mount it."),
        )
        with pytest.raises(RunFailed, match="does not see the folder"):
            prepare_dataset([str(rows)], tmp_path / "out", options, engine=engine_named("ray"))
    prepare_dataset([str(rows)], tmp_path / "out", options, engine=engine_named("ray"))
    prepare_dataset([str(rows)], tmp_path / "local", options)
    assert (tmp_path / "out/manifest.json").read_bytes() == (
        tmp_path / "local/manifest.json"
    ).read_bytes()


def test_a_missing_ray_is_reported_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingPackage, match=r'needs the package ray.*pip install "flatout\[ray\]"'
    ):
        engine_named("ray")


def test_an_unknown_engine_is_rejected_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"no engine named 'rey'.*Did you mean 'ray'\? Known: local, ray"
    ):
        engine_named("rey")


def test_an_unreachable_cluster_and_a_signal_are_reported(ray, monkeypatch):
    shut = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: shut.append(True), raising=False)
    for error, kind, words in (
        (
            ConnectionError("Failed to connect\n  to 10.0.0.1"),
            RunFailed,
            "Cannot connect to Ray: Failed to connect to 10.0.0.1.*RAY_ADDRESS",
        ),
        (SystemExit(15), Interrupted, "Terminated"),
    ):
        before = signal.getsignal(signal.SIGTERM)

        def init(error=error, **_):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise error

        monkeypatch.setattr(ray, "init", init, raising=False)
        output = sys.stdout
        with pytest.raises(kind, match=words):
            RayWorkers().__enter__()
        assert sys.stdout is output
        assert signal.getsignal(signal.SIGTERM) is before
    assert shut == [True, True]
