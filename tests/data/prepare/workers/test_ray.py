"""The Ray workers, with a stand-in for the package ray.

`test_workers_ray_cluster.py` uses a real cluster.
"""

import itertools
import signal
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
from flatout.errors import ConfigError, DataError, MissingPackage, RunFailed
from flatout.storage.files import Unfinished

NUMBERS = itertools.count()


class StandIn:
    """The part of the package ray that is used: a task runs when its result is requested.

    `ends` chooses the running task that ends next.
    """

    def __init__(self, cpus):
        self.cpus = cpus
        self.most = self.waiting = 0
        self.ends = lambda references: references[0]
        self.cancelled = []
        self.exceptions = SimpleNamespace(
            **{
                name: type(name, (RayError,), {}) for name in ("RayTaskError", "WorkerCrashedError")
            },
            RayError=RayError,
        )
        self._calls = {}

    def is_initialized(self):
        return True

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
    """A cluster of two nodes with a CPU each."""
    standing = StandIn([1, 1])
    monkeypatch.setitem(sys.modules, "ray", standing)
    return standing


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
    with pytest.raises(DataError, match=r"On the node .*: late is bad"):
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


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (
            breaks,
            RunFailed,
            r"failed on the node .*: ZeroDivisionError.*--engine local --workers 1",
        ),
        (lacks, MissingPackage, r"On the node .*: It takes a package\. Fix: Install it\."),
        (fills, Unfinished, r"^The disk is full\."),
    ],
)
def test_errors_on_a_node_are_named_with_it(ray, packing, source, kind, words):
    with pytest.raises(kind, match=words) as caught:
        pack(work_items((source,)), packing)
    assert source is not breaks or "in breaks" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "WorkerCrashedError",
            r"gave up on range 0.*4 times: Gone\..*it continues where it stopped.*--workers",
        ),
        ("RayTaskError", r"could not run prepare's task"),
    ],
)
def test_ray_failures_are_explained(ray, packing, name, words):
    def fail(*_):
        raise getattr(ray.exceptions, name)("Gone.\nMore.")

    ray.get = fail
    with pytest.raises(RunFailed, match=words):
        pack(work_items((numbered, 0)), packing)


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        (
            (ray_workers, "_version"),
            lambda: "9.9",
            r"The node .* has flatout .*, and this machine has 9\.9.*Install flatout 9\.9 on",
        ),
        (
            (Path, "touch"),
            lambda path: None,
            r"On the node .*: It does not see the directory .*--out on a disk that every node",
        ),
    ],
)
def test_a_node_with_another_version_or_disk_is_reported(
    ray, packing, monkeypatch, attribute, value, words
):
    monkeypatch.setattr(*attribute, value)
    with pytest.raises(RunFailed, match=words):
        pack(work_items((numbered, 0)), packing)
    assert not files_of(packing)


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


def test_an_unknown_engine_is_rejected_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"no engine named 'rey'.*Did you mean 'ray'\? Known: local, ray"
    ):
        engine_named("rey")


def test_an_unreachable_cluster_is_reported_and_the_handler_of_sigterm_kept(ray, monkeypatch):
    shut = []

    def init(**_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError("Failed to connect\n  to 10.0.0.1")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: shut.append(True), raising=False)
    monkeypatch.setattr(ray, "init", init, raising=False)
    before, output = signal.getsignal(signal.SIGTERM), sys.stdout
    words = "Cannot connect to Ray: Failed to connect to 10.0.0.1.*RAY_ADDRESS"
    with pytest.raises(RunFailed, match=words):
        RayWorkers().__enter__()
    assert (sys.stdout, signal.getsignal(signal.SIGTERM), shut) == (output, before, [True])
