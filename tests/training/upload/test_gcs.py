"""Uploads to gs://, on a local emulator of Google Cloud Storage."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import fsspec
import pytest

from flatout.errors import Stopped
from flatout.storage.whole import name_of
from flatout.training.run import run_training

pytestmark = pytest.mark.slow
URL = "gs://corpus/runs"


@pytest.fixture
def gcs(monkeypatch):
    """An empty bucket named `corpus`, which gcsfs finds by environment variables."""
    core = pytest.importorskip("gcsfs.core")  # the extended class asks real servers over gRPC
    pytest.importorskip("gcp_storage_emulator")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*words, "--port", str(port), "--no-store-on-disk", "--default-bucket", "corpus"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    monkeypatch.setenv("FSSPEC_GCS_TOKEN", "anon")
    before = fsspec.get_filesystem_class("gs")
    fsspec.register_implementation("gs", core.GCSFileSystem, clobber=True)
    monkeypatch.setattr(core.GCSFileSystem, "cachable", False)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/storage/v1/b/corpus", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the server did not start"
                time.sleep(0.1)
        yield core.GCSFileSystem()
    finally:
        fsspec.register_implementation("gs", before, clobber=True)
        process.terminate()
        process.wait()


@pytest.mark.thorough
def test_a_lost_run_comes_back_from_google_cloud_storage(
    tiny_config, tmp_path, gcs, stop_at, events
):
    whole = run_training(tiny_config(), tmp_path / "whole")
    config, run = tiny_config(checkpoint__upload=URL, checkpoint__every_steps=2), tmp_path / "run"
    with pytest.raises(Stopped, match="step 3"):
        run_training(config, run, observers=[stop_at(3)])
    shutil.rmtree(run)
    assert run_training(config, run)["weights_sha256"] == whole["weights_sha256"]
    assert events(run, "restore")[0]["step"] == 3
    found = {path.removeprefix("corpus/runs/run/") for path in gcs.find("corpus/runs/run")}
    local = run / "checkpoints" / "step-6"
    copy = name_of("step-6", (local / "manifest.json").read_bytes())
    assert {f"{copy}/{path.name}" for path in local.iterdir()} <= found
    assert not any(path.startswith("step-3-") for path in found), "deleted here, deleted there"
