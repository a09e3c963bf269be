import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm import run_ranks

from flatout.distributed import rendezvous
from flatout.distributed.rendezvous import (
    VARIABLES,
    Ranks,
    connect,
    disconnect,
    launcher,
    stated_ranks,
)
from flatout.errors import ConfigError, RunFailed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
UNDER_TORCHRUN = """
import warnings, torch
warnings.simplefilter("error")
from flatout.distributed.rendezvous import connect, disconnect
import torch.distributed as dist
ranks = connect("cpu")
total = torch.tensor(ranks.rank + 1)
dist.all_reduce(total)
if ranks.rank == 1:
    numbers = (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size)
    print(*numbers, total.item(), dist.get_backend())
disconnect()
"""


@pytest.fixture
def environment(monkeypatch):
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def state(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return state


COMPLETE = {
    "RANK": 1,
    "WORLD_SIZE": 2,
    "LOCAL_RANK": 1,
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": 1,
}


def test_without_torchrun_there_is_one_process_and_no_group(environment):
    assert connect("cpu") == Ranks() == Ranks(0, 1, 0)
    assert not dist.is_initialized()
    disconnect()


def test_one_process_under_torchrun_needs_no_group(environment):
    environment(**COMPLETE | {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0})
    assert connect("cpu") == Ranks()
    assert not dist.is_initialized()


def test_ranks_are_read(environment):
    environment(**COMPLETE)
    assert stated_ranks() == Ranks(1, 2, 1, 2)
    environment(**COMPLETE | {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4})
    assert stated_ranks() == Ranks(5, 8, 1, 4)


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_rejected(environment, missing):
    environment(**{name: value for name, value in COMPLETE.items() if name != missing})
    with pytest.raises(ConfigError, match=f"{missing}.*torchrun"):
        connect("cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"RANK": number} for number in ("two", "-1", 2)),
        *({"LOCAL_WORLD_SIZE": number} for number in ("all", 1, 3)),
        *({"MASTER_PORT": port} for port in ("many", 0, 70000)),
    ],
)
def test_impossible_ranks_are_rejected(environment, wrong):
    environment(**COMPLETE | wrong)
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f" {name}={value}[ ,].*impossible"):
        connect("cpu")


def test_two_processes_cannot_share_a_gpu(environment, monkeypatch):
    environment(**COMPLETE)
    with pytest.raises(ConfigError, match="names one GPU"):
        connect("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--nproc-per-node 1"):
        connect("cuda")


@pytest.mark.thorough
def test_torchrun_connects_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(script)]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "2", "1", "2", "3", "gloo"]


def test_a_port_in_use_is_named(environment, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment(**COMPLETE | {"RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": port})
        with pytest.raises(
            ConfigError, match=f"MASTER_PORT={port} is in use .*torchrun --standalone"
        ):
            connect("cpu")
    assert not dist.is_initialized()


def test_an_error_after_a_restart_names_the_switch_of_torchrun(environment, monkeypatch):
    """torchrun keeps the addresses of the first start, unless this is set."""
    environment(**COMPLETE | {"RANK": 0, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": "1"})

    def refused(*arguments, **options):
        raise RuntimeError("Gloo connectFullMesh failed with timed out connecting\n more")

    monkeypatch.setattr(rendezvous, "rendezvous", lambda *a, **o: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", refused)
    with pytest.raises(RunFailed, match="timed out connecting") as failed:
        connect("cpu")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in failed.value.fix


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_alone_reports_that_it_waits_and_gives_up(environment, monkeypatch, capfd, rank):
    monkeypatch.setattr(rendezvous, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(rendezvous, "REPORT_AFTER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment(**COMPLETE | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port})
    message = f"The 2 processes of this run did not connect at 127.0.0.1:{port}: "
    with pytest.raises(RunFailed, match=message):
        connect("cpu")
    assert (
        f"[rank {rank}] Waiting at 127.0.0.1:{port} for the other processes of 2, up to 1 s."
        in capfd.readouterr().err
    )
    assert not dist.is_initialized()


def test_the_launcher_is_recognised(environment, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("FLATOUT_LAUNCHER", raising=False)
    assert launcher() is None
    environment(TORCHELASTIC_RUN_ID="none")
    assert launcher() == os.getppid()
    environment(FLATOUT_LAUNCHER="4711")
    assert launcher() == 4711


def test_after_the_first_step_a_rank_that_does_not_answer_ends_the_run():
    assert rendezvous.STEP_TIMEOUT.total_seconds() == 600
    done = run_ranks([Path(__file__).with_name("slow_rank.py")], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "did not answer in time" in done.stdout
