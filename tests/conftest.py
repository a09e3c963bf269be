"""Tiny datasets and runs for the tests, which run without the user's home directory."""

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from flatout.config.schema import load_config
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.tokenizers import make_tokenizer

sys.path.append(str(Path(__file__).parent))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background jobs of a shell, and their children, ignore Ctrl+C; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Set HOME to an empty directory, so that tests do not read the user's cache.

    Other processes keep their paths in the user's home.
    """
    home = Path.home()
    for name, folder in {
        "GIT_CONFIG_GLOBAL": ".gitconfig",
        "HF_HOME": ".cache/huggingface",
        "PYTHONUSERBASE": ".local",
        "TRITON_CACHE_DIR": ".triton/cache",
    }.items():
        os.environ.setdefault(name, str(home / folder))
    own = tempfile.TemporaryDirectory(prefix="flatout-home-")
    os.environ["HOME"] = own.name
    os.environ.pop("FLATOUT_CACHE", None)
    config.add_cleanup(lambda: os.environ.update(HOME=str(home)))
    config.add_cleanup(own.cleanup)


def pytest_addoption(parser):
    parser.addoption(
        "--write-tables",
        action="store_true",
        help="Write the tables that tests generate into the documentation.",
    )


def pytest_make_parametrize_id(val, argname):
    """Name a case of bytes by its argument: its content may include a time of packing.

    The processes of pytest-xdist must agree on the names of tests.
    """
    return argname if isinstance(val, bytes) else None


def is_for_gpu(item):
    return item.get_closest_marker("gpu") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what `quick_cases` leaves out, and allow the warnings of compilers and drivers."""
    for item in items:
        quick = item.get_closest_marker("quick_cases")
        if quick and item.callspec.id not in quick.args:
            item.add_marker("thorough")
        if item.get_closest_marker("gpu_essential"):
            item.add_marker("gpu")
        if is_for_gpu(item):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_collection_finish():
    """Exempt what is imported by now from garbage collections, and make these rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_setup(item):
    """Reset torch's settings before a GPU test: earlier tests of this process changed them."""
    if not is_for_gpu(item):
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    share_memory()
    torch._dynamo.reset()
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@cache
def share_memory():
    """Limit this process to its share of the GPU's memory; CUDA contexts take a tenth."""
    import torch

    torch.cuda.set_per_process_memory_fraction(
        0.9 / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    )


def pytest_runtest_teardown(item):
    """Return GPU memory to the other processes."""
    if (
        is_for_gpu(item)
        and (torch := sys.modules.get("torch")) is not None
        and torch.cuda.is_initialized()
    ):
        gc.collect()
        torch.cuda.empty_cache()


WORDS = (
    "the",
    "a",
    "run",
    "loss",
    "token",
    "step",
    "model",
    "train",
    "fast",
    "slow",
    "graph",
    "layer",
    "weight",
    "memory",
    "cache",
    "order",
    "shard",
)

TINY = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 2,
    "data.seq_len": 16,
    "batch.tokens_per_step": 128,
    "batch.rows_per_device": 4,
    "optim.lr": 1e-2,
    "train.steps": 6,
    "train.device": "cpu",
    "train.precision": "fp32",
    "log.every": 1,
    "speedups": "auto,-compile,-collector",
    "name": "tiny",
}
"""Two layers, 16 tokens, 8 sequences per step in two micro-batches, 6 steps: takes 0.1 s.

It uses fp32 on every processor, so that runs can be compared. The collector would begin each run
with a full collection, which takes seconds among the objects of thousands of tests.
"""


def write_tiny_set(out: Path, *, num_documents: int = 40, masked: bool = False) -> Path:
    """Write a dataset of random words as bytes; `masked` excludes about a third of the targets."""
    draw = random.Random(7)
    tokenizer = make_tokenizer("byte", lambda _: [])
    with DatasetWriter(out, tokenizer) as writer:
        for number in range(num_documents):
            text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(20, 60))) + "."
            tokens = np.array([*tokenizer.encode(text), tokenizer.eot_id])
            mask = (
                np.array([draw.random() < 0.66 for _ in tokens], dtype=np.uint8) if masked else None
            )
            split = "val" if number % 8 == 7 else "train"
            size = len(text.encode())
            writer.append(split, tokens, [len(tokens)], text_bytes=size, mask=mask)
        writer.finish(source={"made": "up"}, split_rule="every eighth document")
    return out


@pytest.fixture
def is_current(request):
    """Return a function that fails unless a generated file is current, or writes it."""

    def check(path, wanted):
        if request.config.getoption("--write-tables"):
            path.write_text(wanted, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != wanted:
            test = request.node.nodeid.partition("::")[0]
            pytest.fail(f"{path} is out of date: `python -m pytest {test} --write-tables`.")

    return check


@pytest.fixture
def survived(request):
    """Return a function that counts the tries of a fault, and fails with the problems found."""

    def count(fault, tries, problems):
        import fault_records

        assert fault in fault_records.FAULTS
        writes = request.config.getoption("--write-tables")
        if writes and request.node.get_closest_marker("faults"):
            case = request.node.nodeid.removeprefix("tests/")
            fault_records.record(fault, case, tries, max(tries - len(problems), 0))
        assert not problems
        assert tries

    return count


@pytest.fixture(scope="session")
def tiny_set(tmp_path_factory):
    """The path of a dataset of 40 short documents."""
    return write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny")


@pytest.fixture(scope="session")
def ragged_set(tmp_path_factory):
    """The same with a loss mask: the number of targets varies between micro-batches."""
    return write_tiny_set(tmp_path_factory.mktemp("sets") / "ragged", masked=True)


@pytest.fixture(scope="session")
def write_tiny():
    """Return a function that writes another tiny dataset."""
    return write_tiny_set


@pytest.fixture(scope="session")
def tiny():
    """The tiny run's settings, by dotted key."""
    return dict(TINY)


@pytest.fixture
def tiny_config(tiny_set):
    """Return a function that makes a tiny run's configuration, changed by `section__key=value`."""

    def make(**changes):
        return load_config().with_values(
            {**TINY, "data.path": str(tiny_set), "train.eval_every": 0}
            | {key.replace("__", "."): value for key, value in changes.items()}
        )

    return make


@pytest.fixture
def build_run(tmp_path):
    """Return a function that resolves and builds a run of one process, at step 0."""
    from flatout.assembly.resolve import resolve
    from flatout.assembly.run import build
    from flatout.data.store.mix import open_data
    from flatout.distributed.mesh import make_mesh
    from flatout.hardware.machine import probe

    runs = []

    def make(config, folder=tmp_path / "run", mesh=None):
        dataset = open_data(config.data)
        resolved, decisions = resolve(config, machine=probe(), dataset=dataset, world_size=1)
        mesh = mesh or make_mesh(resolved.parallel, "cpu")
        run = build(
            resolved,
            machine=probe(),
            mesh=mesh,
            dataset=dataset,
            folder=folder,
            decisions=decisions,
        )
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.loader.close()


@pytest.fixture
def planned(build_run, tiny_config):
    """Return a run of 100 steps, which is not trained."""
    return build_run(tiny_config(train__steps=100))


@pytest.fixture
def past(planned):
    """Return a function from fields to the record of a run like `planned` with these fields."""
    from flatout.assembly.measured import past_run

    record = past_run(planned.config, planned.decisions)
    return lambda **fields: record.model_copy(update=fields)


@pytest.fixture(scope="session")
def fox_run(tmp_path_factory):
    """A directory with a run of three steps, a checkpoint at each, and the run's result."""
    from flatout.cli.commands.train import train
    from flatout.data.prepare.pipeline import Options, prepare_dataset

    root = tmp_path_factory.mktemp("fox")
    (root / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    prepare_dataset(
        [str(root / "book.txt")],
        root / "data",
        Options(tokenizer="char", split="tail 0.1"),
        workers=1,
    )
    overrides = [
        "model.num_layers=1",
        "model.d_model=16",
        "model.num_heads=1",
        "data.seq_len=32",
        "batch.rows_per_device=4",
        "batch.tokens_per_step=128",
        "optim.lr=0.1",
    ]
    config = load_config(
        None,
        [
            *overrides,
            f"data.path={root / 'data'}",
            "train.steps=3",
            "train.device=cpu",
            "train.eval_every=1",
            "checkpoint.keep=9",
        ],
    )
    return root, train(config, run=root / "runs" / "fox")


@pytest.fixture(scope="session")
def s3_server():
    """The URL of a local S3 server; tests are skipped when its packages are not installed."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the server did not start"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """An empty bucket named `corpus`, which s3fs finds by environment variables."""
    import s3fs

    for key, value in {
        "ENDPOINT_URL": s3_server,
        "ACCESS_KEY_ID": "key",
        "SECRET_ACCESS_KEY": "secret",
        "DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(f"AWS_{key}", value)
    urllib.request.urlopen(
        urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST"), timeout=5
    ).close()
    s3fs.S3FileSystem.clear_instance_cache()
    filesystem = s3fs.S3FileSystem()
    filesystem.mkdir("corpus")
    yield filesystem
    s3fs.S3FileSystem.clear_instance_cache()
