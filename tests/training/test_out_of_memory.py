"""Torch's errors in a run are replaced by ours, with a fix."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatout.errors import RunFailed
from flatout.training import loop, out_of_memory
from flatout.training.out_of_memory import explained, is_out_of_memory, peers_named
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code

pytestmark = pytest.mark.slow


def test_out_of_memory_reports_the_need_and_what_fits(tiny_config, tmp_path, monkeypatch):
    def fail(run, batch, *_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "train_step", fail)
    message = (
        r"Out of memory at step 0: this run needs about [\d.]+ MiB with 4 rows "
        r".*rows_per_device=2 batch.accumulate=4"
    )
    with pytest.raises(RunFailed, match=message):
        run_training(tiny_config(), tmp_path / "run")
    assert read_exit_code(tmp_path / "run") == 1


def test_a_run_that_needs_more_than_is_free_says_so_before_its_first_step(
    tiny_config, tmp_path, monkeypatch, messages
):
    """Rows of flatout's choice are small on a CPU, and those of a user may be any."""
    monkeypatch.setattr(out_of_memory, "free_bytes", lambda *_: 1000)
    run_training(tiny_config(train__steps=1), tmp_path / "run", progress=messages)
    assert any("By estimate this run needs " in line for line in messages.lines)


def test_onednn_without_memory_is_out_of_memory():
    """oneDNN only says that it could not create a primitive, or in torch 2.11 not execute it."""
    script = Path(__file__).with_name("onednn_without_memory.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode == -signal.SIGSEGV or "None" in done.stdout:
        pytest.skip("oneDNN reported no error")  # without memory it may crash, too
    words = ("could not create a primitive", "could not execute a primitive")
    assert done.stdout.splitlines() in [[one, "True"] for one in words], done.stderr


def test_an_operation_that_onednn_does_not_support_is_not_out_of_memory():
    words = "could not create a primitive descriptor for the matmul primitive"
    assert not is_out_of_memory(RuntimeError(words))
    assert is_out_of_memory(RuntimeError("could not create a memory object"))


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1",
        "Connection reset by peer",
    ],
)
def test_the_end_of_another_process_is_reported(message):
    error = pytest.raises(RunFailed, match=r"Another process of this run has ended\.")
    with error, peers_named():
        raise RuntimeError(message)


def test_other_errors_pass_unchanged():
    with pytest.raises(RuntimeError, match="a bug"), explained(None), peers_named():
        raise RuntimeError("a bug")
