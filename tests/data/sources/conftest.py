"""Parquet files, and servers on loopback: a web server, and a hub of Hugging Face datasets."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "storage" / "remote")]

from hub_server import HubServer
from web_server import memory, web  # noqa: F401


@pytest.fixture
def parquet():
    """Return a function that encodes columns: `parquet({"text": [...]}, row_group_size=10)`."""
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def make(columns, **options):
        file = io.BytesIO()
        tables.write_table(pyarrow.table(columns), file, **options)
        return file.getvalue()

    return make


@pytest.fixture
def hub():
    """A running HubServer."""
    with HubServer().running() as server:
        yield server


@pytest.fixture
def ask_hub(hub, tmp_path):
    """Run a program in a new Python whose hub is the HubServer, and return the JSON it prints.

    The libraries read the hub's URL when they are imported.
    """

    def ask(program: str, *words: str) -> object:
        environment = {
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_ENDPOINT": hub.address,
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask
