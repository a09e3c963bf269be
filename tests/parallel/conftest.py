import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Run a file of this directory in several processes, and return the main one's report."""

    def run(worker, world_size, *arguments):
        report = tmp_path_factory.mktemp("launch") / "report.json"
        shared = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
        }
        shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / worker), str(report), *map(str, arguments)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            outputs = [process.communicate(timeout=200) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (out, err) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, err
            assert (out, err) == ("", "")
        return json.loads(report.read_text())

    return run
