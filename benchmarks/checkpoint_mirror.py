"""A mirror for the benchmark of checkpoints: an S3 server on this machine, or a directory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

S3_SERVER, DIRECTORY = "an S3 server (moto) on the same cores", "a directory on the same disk"
START_LIMIT_S = 60.0


@contextmanager
def mirror(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the URL of an empty mirror, and what it is: a server if its packages are installed.

    The server keeps what it gets in memory. Its URL and its keys are in the environment, which
    commands started meanwhile inherit.
    """
    if find_spec("moto") is None or find_spec("s3fs") is None:
        yield f"file://{folder / 'mirror'}", DIRECTORY
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(port, process)
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/runs", S3_SERVER
    finally:
        process.kill()
        process.wait()


def empty(url: str) -> None:
    """Delete what is in the mirror."""
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def _await(port: int, process: subprocess.Popen) -> None:
    """Wait until the server accepts connections.

    Raises: SystemExit when it does not start.
    """
    began_s = time.monotonic()
    while time.monotonic() - began_s < START_LIMIT_S and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit("The S3 server (moto) did not start.")
