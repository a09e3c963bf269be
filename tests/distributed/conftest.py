import json
import socket
from pathlib import Path

import pytest
from warm import run_ranks

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
        done = run_ranks([HERE / worker, report, *arguments], world_size)
        assert done.returncode == 0, done.stderr
        assert (done.stdout, done.stderr) == ("", "")
        return json.loads(report.read_text())

    return run
