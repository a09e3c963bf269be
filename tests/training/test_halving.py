"""A run that runs out of memory starts again from its last checkpoint with half the rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from flatout.distributed.launch import launch
from flatout.errors import OutOfMemory, RunFailed, Stopped
from flatout.models.transformer import Transformer
from flatout.optim.adamw import LightAdamW
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_config
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow

AUTO = {"batch__rows_per_device": "auto", "train__eval_every": 3, "checkpoint__every_steps": 2}


class Device:
    """A device that runs out of memory with more than `most_rows`, from one call on."""

    def __init__(self, monkeypatch):
        self.most_rows, self.calls, self.since, self.in_training = 8, 0, 0, True
        forward = Transformer.forward
        device = self

        def limited(self, tokens_BT, *more):
            if device.in_training == torch.is_grad_enabled():
                device.calls += 1
                if device.calls > device.since and len(tokens_BT) > device.most_rows:
                    torch.rand(3)  # as dropout does
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(self, tokens_BT, *more)

        monkeypatch.setattr(Transformer, "forward", limited)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@pytest.mark.quick_cases("direct-at the start", "prefetch-in the middle")
@pytest.mark.parametrize("since", [0, 3], ids=["at the start", "in the middle"])
@pytest.mark.parametrize("speedups", ["auto,-compile", "micro-batch"], ids=["prefetch", "direct"])
def test_the_run_starts_again_with_rows_that_fit(
    since, speedups, tiny_config, tmp_path, device, records, events, losses
):
    config = tiny_config(**AUTO, speedups=speedups)
    whole = run_training(config, tmp_path / "whole")
    device.most_rows, device.calls, device.since = 2, 0, since
    run = tmp_path / "run"
    result = run_training(config, run)
    assert (result["steps"], result["tokens"]) == (whole["steps"], whole["tokens"])
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    found = [
        (e["step"], e["rows_before"], e["rows_per_device"]) for e in events(run, "smaller_batch")
    ]
    assert found == [(since, 8, 4), (since, 4, 2)]
    stored = read_config(run).batch
    assert (stored.rows_per_device, stored.accumulate, stored.tokens_per_step) == (2, 4, 128)


def test_a_failed_attempt_leaves_nothing_behind(tiny_config, tmp_path, device):
    explicit = tiny_config(model__dropout=0.2, batch__rows_per_device=4)
    chosen = tiny_config(model__dropout=0.2, batch__rows_per_device="auto")
    device.most_rows = 4
    whole = run_training(explicit, tmp_path / "whole")
    assert run_training(chosen, tmp_path / "run")["weights_sha256"] == whole["weights_sha256"]


def test_a_resumed_run_keeps_the_smaller_micro_batch(
    tiny_config, tmp_path, device, stop_at, events
):
    config, run = tiny_config(**AUTO), tmp_path / "run"
    device.most_rows = 4
    with pytest.raises(Stopped):
        run_training(config, run, observers=[stop_at(3)])
    assert run_training(config, run)["steps"] == 6
    assert len(events(run, "smaller_batch")) == 1


def test_an_evaluation_out_of_memory_is_repeated_too(tiny_config, tmp_path, device, events):
    config = tiny_config(**AUTO)
    whole = run_training(config, tmp_path / "whole")
    device.most_rows, device.calls, device.in_training = 4, 0, False
    result = run_training(config, tmp_path / "run")
    assert result["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)
    assert [event["step"] for event in events(tmp_path / "run", "smaller_batch")] == [3]


def test_rows_that_the_user_set_are_not_changed(tiny_config, tmp_path, device, events):
    device.most_rows = 2
    with pytest.raises(OutOfMemory, match="Out of memory at step 0"):
        run_training(tiny_config(), tmp_path / "run")
    assert events(tmp_path / "run", "smaller_batch") == []


def test_a_single_row_that_does_not_fit_is_an_error(tiny_config, tmp_path, device):
    device.most_rows = 0
    with pytest.raises(OutOfMemory, match="with 1 row per device"):
        run_training(tiny_config(**AUTO), tmp_path / "run")


def test_no_memory_for_the_update_is_an_error(tiny_config, tmp_path, monkeypatch, events):
    def full(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(LightAdamW, "step", full)
    with pytest.raises(OutOfMemory, match=r"in the optimizer's step at step 0.*less state"):
        run_training(tiny_config(**AUTO), tmp_path / "run")
    assert events(tmp_path / "run", "smaller_batch") == []


def two_processes(tmp_path, config, name, *limit):
    """Train with two processes and return the exit code; `limit` is that of limited_rank.py."""
    recipe = tmp_path / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    script = Path(__file__).with_name("limited_rank.py")
    words = ["train", str(recipe), "--run-dir", str(tmp_path / name)]
    command = [sys.executable, str(script), *map(str, limit), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return launch(command, 2, environment, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rank", "most_rows", "since", "expected"),
    [
        pytest.param(1, 1, 0, [(0, 4, 2), (0, 2, 1)], id="start", marks=pytest.mark.faults),
        pytest.param(0, 2, 3, [(3, 4, 2)], id="middle"),
    ],
)
def test_two_processes_start_again_together_with_rows_that_fit(
    rank, most_rows, since, expected, tiny_config, tmp_path, events, capfd
):
    """From the beginning or from the last checkpoint, whichever rank ran out of memory."""
    config = tiny_config(**AUTO, speedups="micro-batch")
    whole = run_training(config, tmp_path / "whole")
    several = config.with_values({"train.devices": 2})
    assert two_processes(tmp_path, several, "run", rank, most_rows, since) == 0
    run = RunLog(tmp_path / "run").summary
    assert (run["steps"], run["tokens"]) == (whole["steps"], whole["tokens"])
    assert run["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)
    found = [
        (event["step"], event["rows_before"], event["rows_per_device"])
        for event in events(tmp_path / "run", "smaller_batch")
    ]
    assert found == expected
    stored = read_config(tmp_path / "run").batch
    assert stored.rows_per_device == found[-1][-1]
    assert stored.accumulate == 4 // stored.rows_per_device
    assert stored.tokens_per_step == 128
    assert f"Out of memory on rank {rank} after step {since}" in capfd.readouterr().err
    assert (run["resumed_from"] is None) is (since == 0)


@pytest.mark.thorough
def test_a_pipeline_starts_again_with_rows_that_fit(tiny_config, tmp_path, events):
    """torch wraps the error of the stage in one of its own."""
    config = tiny_config(
        **AUTO,
        batch__tokens_per_step=1024,
        speedups="micro-batch",
        model__tied_head=False,
        parallel__pipeline=2,
        train__devices=2,
    )
    assert two_processes(tmp_path, config, "run", 1, 2, 20) == 0, "in the second step"
    (event,) = events(tmp_path / "run", "smaller_batch")
    assert (event["rows_before"], event["rows_per_device"]) == (4, 2)
    stored = read_config(tmp_path / "run").batch
    assert (stored.rows_per_device, stored.accumulate) == (2, 32)


@pytest.mark.thorough
def test_two_processes_with_rows_of_the_user_end(tiny_config, tmp_path, events, capfd):
    config = tiny_config(train__devices=2, batch__rows_per_device=2)
    with pytest.raises(RunFailed):
        two_processes(tmp_path, config, "run", 1, 1, 0)
    assert "Out of memory at step 0" in capfd.readouterr().err
    assert events(tmp_path / "run", "smaller_batch") == []


@pytest.mark.faults
def test_a_process_with_little_memory_finds_rows_that_fit(tiny_set, tmp_path):
    """The operating system rejects the memory: the limit is set when the run is built."""
    script = Path(__file__).with_name("little_memory.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_set), str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] < found["first_rows"]
    assert found["steps"] == 1
