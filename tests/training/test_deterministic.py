"""train.deterministic: bit-equal runs; nondeterministic operations are rejected by name.

tests/training/test_gpu.py tests it on a GPU.
"""

import pytest
import torch

from flatout.distributed.rendezvous import Ranks
from flatout.errors import RunFailed, Stopped
from flatout.training import loop
from flatout.training import run as training
from flatout.training.run import run_training

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def back_to_any_algorithm():
    yield
    torch.use_deterministic_algorithms(False)


def test_a_deterministic_run_resumes_bit_for_bit(tiny_config, tmp_path, stop_at):
    config = tiny_config(train__deterministic=True, speedups="none")
    whole = run_training(config, tmp_path / "whole")
    assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "parts", observers=[stop_at(3)])
    assert run_training(config, tmp_path / "parts")["weights_sha256"] == whole["weights_sha256"]


def test_deterministic_algorithms_are_set_before_processes_connect(
    tiny_config, tmp_path, monkeypatch
):
    """NCCL chooses its algorithms when they connect."""
    seen = []
    monkeypatch.setattr(
        training,
        "connect",
        lambda device: seen.append(torch.are_deterministic_algorithms_enabled()) or Ranks(),
    )
    for deterministic in (True, False):
        run_training(
            tiny_config(train__deterministic=deterministic, train__steps=1),
            tmp_path / str(deterministic),
        )
    assert seen == [True, False]


def test_an_operation_without_a_deterministic_form_is_named(tiny_config, tmp_path, monkeypatch):
    """This operation has none on a CPU either, so torch rejects it."""

    def fail(run, batch, *_):
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(
        RunFailed, match=r"train\.deterministic=true, but put_ has no deterministic form on cpu"
    ) as failed:
        run_training(tiny_config(train__deterministic=True), tmp_path / "run")
    assert "train.deterministic=false" in str(failed.value)
