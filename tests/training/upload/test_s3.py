"""Uploads to s3://, on an S3 server behind a proxy that fails, stalls and cuts bodies short."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from flatout.training.checkpoint import catalog
from flatout.training.run import run_training
from flatout.training.upload import uploader as module

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
URL = "s3://corpus/runs"


@pytest.fixture
def config(tiny_config):
    return tiny_config(checkpoint__upload=URL, checkpoint__every_steps=2)


@pytest.fixture
def whole(tiny_config, tmp_path):
    """The weights of the run without interruptions."""
    return run_training(tiny_config(), tmp_path / "whole")["weights_sha256"]


def there(bucket, step):
    """Return the names of the files of a step, of which there must be one copy at most."""
    names = [
        path.rpartition("/")[2]
        for path in bucket.find("corpus/runs/run")
        if re.search(rf"/step-{step}-", path)
    ]
    assert len(set(names)) == len(names)
    return set(names)


def test_a_lost_run_comes_back_from_s3(config, whole, tmp_path, bucket, stop_at, events):
    with pytest.raises(Exception, match="Stopped at step 3"):
        run_training(config, tmp_path / "run", observers=[stop_at(3)])
    shutil.rmtree(tmp_path / "run")
    assert run_training(config, tmp_path / "run")["weights_sha256"] == whole
    assert events(tmp_path / "run", "restore")[0]["step"] == 3
    assert there(bucket, 3) == set(), "deleted here, deleted there"
    local = tmp_path / "run" / "checkpoints" / "step-6"
    assert there(bucket, 6) == {path.name for path in local.iterdir()}


@pytest.mark.parametrize("status", [500, 503, "cut"])
@pytest.mark.parametrize("failing", [r"PUT .*model", r"PUT .*manifest", r"GET .*runs"])
def test_a_server_that_fails_for_a_while_loses_nothing(
    config, whole, tmp_path, between, bucket, monkeypatch, status, failing
):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    between.failing, between.times, between.status = failing, 3, status
    assert run_training(config, tmp_path / "run")["weights_sha256"] == whole
    between.times = 0
    run_training(config, tmp_path / "run")  # sends what the first could not
    shutil.rmtree(tmp_path / "run")
    between.times = 3
    assert run_training(config, tmp_path / "run")["weights_sha256"] == whole
    assert catalog.verify(tmp_path / "run" / "checkpoints" / "step-6") == []


def test_a_stalled_upload_does_not_stop_training(
    config, whole, tmp_path, between, bucket, monkeypatch, messages, events
):
    monkeypatch.setattr(module, "STALL_S", 0.5)
    between.failing, between.times, between.status = r"PUT .*step-", 10_000, "stall"
    summary = run_training(config, tmp_path / "run", progress=messages)
    assert summary["weights_sha256"] == whole
    assert events(tmp_path / "run", "upload_pending")
    between.times = 0
    between.released.set()
    run_training(config, tmp_path / "run")
    assert "manifest.json" in there(bucket, 6)


@pytest.mark.faults
def test_a_run_that_is_killed_while_it_sends_continues_its_upload(
    config, whole, tmp_path, between, bucket
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "flatout", "train", str(recipe), "--run-dir"]
    for name in ("model", "optimizer", "manifest", "index"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        if bucket.exists("corpus/runs"):
            bucket.rm("corpus/runs", recursive=True)
        between.failing, between.times, between.status = rf"PUT .*step-.*{name}", 10_000, 503
        process = subprocess.Popen(
            [*command, str(tmp_path / "run")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while between.times == 10_000:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        between.times = 0
        assert run_training(config, tmp_path / "run")["weights_sha256"] == whole
        assert "manifest.json" in there(bucket, 6)
        shutil.rmtree(tmp_path / "run")
        assert run_training(config, tmp_path / "run")["weights_sha256"] == whole
