"""Ranges packed by two nodes of a real Ray cluster on this machine."""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time

import pytest
from corpora import work_items

from flatout.data.prepare.pack.range_files import DATASET, RANGES
from flatout.data.prepare.pack.tokenize import Packing
from flatout.data.prepare.pipeline import Options, engine_named, prepare_dataset
from flatout.data.prepare.plan import make
from flatout.data.prepare.workers import ray as ray_workers
from flatout.data.prepare.workers.local import LocalWorkers
from flatout.data.prepare.workers.ray import RayWorkers
from flatout.data.sources import files
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError, RunFailed

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

SOURCE = """
import os, pathlib, time
from flatout.errors import DataError
from flatout.data.sources import BadRow

def numbered(first, count):
    for number in range(first, first + count):
        yield f"document {number} " * (number % 7 + 1)

def held(first, count, folder):
    # The name of the file: this process, and the node it belongs to.
    folder = pathlib.Path(folder)
    (folder / f"{os.getpid()}-of-{os.getppid()}").touch()
    until = time.monotonic() + 120
    while not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.02)
    yield from numbered(first, count)

def bad(name):
    yield BadRow("is bad", "Mend it.", "bad", name)

def breaks():
    yield "one"
    raise ZeroDivisionError("broken source")

def dies():
    os.kill(os.getpid(), 9)
    yield "never"

def elsewhere():
    raise DataError("There is no such file.", fix="Check the name.")
    yield "one"
"""

ONE_LEFT = "CPUs of the Ray cluster: 1, on 1 node."


def started(num_cpus):
    """A cluster of one node that detects a lost node within two seconds instead of minutes."""
    watchful = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
    }
    arguments = {"num_cpus": num_cpus, "include_dashboard": False, "_system_config": watchful}
    return cluster_utils.Cluster(initialize_head=True, head_node_args=arguments)


@pytest.fixture(scope="module")
def cluster():
    """A node with one CPU, to which this process connects."""
    cluster = started(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def other(cluster, monkeypatch):
    """Another node with one CPU. Both are ready when the test starts."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    node = cluster.add_node(num_cpus=1)
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A module that nodes can import, like a user's source."""
    (tmp_path / "ray_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import ray_source

    yield ray_source
    sys.modules.pop("ray_source")


@pytest.fixture
def packing(tmp_path):
    for name in ("ranges", "dataset"):
        (tmp_path / name).mkdir()
    return Packing(make_tokenizer("byte", lambda limit: ()), Options(), tmp_path)


class Said:
    """A progress that records messages."""

    def __init__(self):
        self.lines = []
        self.task = ray_workers.SILENT.task

    def say(self, line):
        self.lines.append(line)

    def wait(self, line):
        until = time.monotonic() + 120
        while line not in self.lines and time.monotonic() < until:
            time.sleep(0.02)


def pack(work, packing, crew, tell=lambda _: None):
    with crew:
        return list(crew.pack(work, packing, tell))


def content(folder):
    """Return the contents of complete files; the work directory's owner removes unfinished ones."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".part"}


def packed(work_dir):
    """Return the complete files of the ranges in a work directory."""
    return content(work_dir / RANGES) | content(work_dir / DATASET)


def raylet(node):
    return node.all_processes["raylet"][0].process.pid


def kill(cluster, node, processes):
    """Kill a node, then its processes, which would otherwise keep working for a while."""
    cluster.remove_node(node, allow_graceful=False)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def once_held(folder, by, count, act):
    """Call `act(process ids)` in a thread once `count` processes of the node `by` have a range."""

    def run():
        until = time.monotonic() + 120
        while len(found := list(folder.glob(f"*-of-{by}"))) < count and time.monotonic() < until:
            time.sleep(0.02)
        act([int(path.name.split("-")[0]) for path in found])
        (folder / "go").touch()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def held_ranges(source, tmp_path, count):
    (tmp_path / "held").mkdir()
    return work_items(
        *[(source.held, index * 10, 10, str(tmp_path / "held")) for index in range(count)]
    )


@pytest.mark.thorough
def test_the_dataset_is_the_same_as_with_local_workers(other, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 2_000)
    monkeypatch.setattr(make, "range_bytes", lambda _: 4_000)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"text": f"row {number} " * (number % 5 + 1)}) + "\n"
            for number in range(1000)
        )
    )
    options, said = Options(tokenizer="train:300", split="hash 0.2"), Said()
    monkeypatch.chdir(tmp_path)
    prepare_dataset(["rows.jsonl"], tmp_path / "local", options, workers=2)
    prepare_dataset(
        ["rows.jsonl"], tmp_path / "ray", options, engine=engine_named("ray"), progress=said
    )
    assert not ray.is_initialized()
    assert content(tmp_path / "ray") == content(tmp_path / "local")
    assert prepare_dataset(["rows.jsonl"], tmp_path / "ray", options).existed, (
        "the engine does not change the dataset"
    )
    assert "CPUs of the Ray cluster: 2, on 2 nodes." in said.lines
    assert not list(tmp_path.glob(".ray*"))


@pytest.mark.thorough
def test_a_dead_node_costs_only_its_ranges(cluster, other, source, packing, tmp_path):
    work, told, said = held_ranges(source, tmp_path, 12), [], Said()
    killer = once_held(
        tmp_path / "held",
        raylet(other),
        1,
        lambda found: (kill(cluster, other, found), said.wait(ONE_LEFT)),
    )
    records = pack(work, packing, RayWorkers(progress=said), told.append)
    killer.join()
    assert ONE_LEFT in said.lines
    assert [record.number for record in records] == list(range(12))
    assert sum(tally.documents for tally in told) == 120, "repeated work is reported once"
    of_cluster = packed(packing.folder)
    assert len(of_cluster) == 3 * 12, "tokens, ends and record"
    for name in (RANGES, DATASET):
        shutil.rmtree(packing.folder / name)
        (packing.folder / name).mkdir()
    pack(work, packing, LocalWorkers(1))
    assert of_cluster == packed(packing.folder)


@pytest.mark.thorough
def test_a_killed_process_costs_only_its_range(other, source, packing, tmp_path, capfd):
    work = held_ranges(source, tmp_path, 6)
    killer = once_held(
        tmp_path / "held", raylet(other), 1, lambda found: os.kill(found[0], signal.SIGKILL)
    )
    assert sum(record.documents for record in pack(work, packing, RayWorkers())) == 60
    killer.join()
    assert capfd.readouterr().out == "", "standard output is for results"


@pytest.mark.thorough
def test_a_range_that_kills_every_process_is_named(other, source, packing, monkeypatch):
    monkeypatch.setattr(ray_workers, "RETRIES", 1)
    with pytest.raises(
        RunFailed,
        match=r"gave up on range 1.*2 times.*it continues where it stopped.*fewer --workers",
    ):
        pack(work_items((source.numbered, 0, 3), (source.dies,)), packing, RayWorkers())


@pytest.mark.thorough
def test_an_error_names_its_node(other, source, packing):
    with pytest.raises(DataError, match=r"On the node .*: There is no such file"):
        pack(work_items((source.elsewhere,)), packing, RayWorkers())


@pytest.mark.thorough
def test_a_cluster_in_use_keeps_running(other, source, packing):
    ray.init(log_to_driver=False, logging_level="ERROR")
    try:
        pack(work_items((source.numbered, 0, 3)), packing, RayWorkers(1))
        assert ray.is_initialized()
    finally:
        ray.shutdown()
