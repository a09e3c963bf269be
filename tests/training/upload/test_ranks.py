"""Two processes that upload: the run comes back on both when its directory is gone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.training.checkpoint import catalog
from flatout.training.run_dir.runlog import RunLog

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ROOT = Path(__file__).parents[3]
STOP = """
import os, signal

from flatout import Quiet


class Stop(Quiet):
    def on_tick(self, step, last_step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def train(tiny_config, tmp_path):
    """Return a function that trains the tiny run in two processes, and returns its exit code."""
    (tmp_path / "stop.py").write_text(STOP)

    def start(run, **changes):
        config = tiny_config(train__devices=2, checkpoint__every_steps=2, **changes)
        (tmp_path / "recipe.yaml").write_text(json.dumps(config.to_dict()))
        done = subprocess.run(
            [sys.executable, "-m", "flatout", "train", "recipe.yaml", "--run-dir", run],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tmp_path}"},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode in (0, 75), done.stderr
        return done.returncode

    return start


@pytest.mark.parametrize("shard", [1, 2], ids=["ddp", "fully-shard"])
def test_a_lost_run_of_two_processes_comes_back(train, tmp_path, shard, events):
    backup, run = (tmp_path / "backup").as_uri(), tmp_path / "run"
    assert train("whole", parallel__shard=shard) == 0
    stops = {"checkpoint__upload": backup, "parallel__shard": shard}
    assert train("run", **stops, log__observers=["stop:Stop"]) == 75
    sent = catalog.checkpoint_path(run, 4 if 4 in catalog.steps(run) else 3)
    names = {path.name for path in sent.iterdir()}
    assert {"model-00001.safetensors", "optimizer-00001.safetensors"} <= names
    (there,) = (tmp_path / "backup" / "run").glob(f"{sent.name}-*")
    assert {path.name for path in there.iterdir()} == names
    shutil.rmtree(run)
    assert train("run", **stops) == 0
    assert events(run, "restore")[0]["step"] == catalog.step_of(sent)
    ends = [RunLog(tmp_path / name).summary for name in ("whole", "run")]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
