"""cuDNN's benchmark mode is a process setting: it is on in the loop and restored afterwards."""

import pytest
import torch

from flatout.assembly.choices import speedup_named
from flatout.hardware.machine import Gpu, Machine
from flatout.speedups.cudnn_autotune import benchmarking

GPU = Machine("a CPU", 2, 8.0, (Gpu("an H200", 140.0, (9, 0), "1"),), "3.11")


@pytest.mark.parametrize("before", [False, True])
def test_it_is_enabled_only_inside_even_when_the_loop_fails(monkeypatch, before):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    seen = []

    def fail():
        with benchmarking():
            seen.append(torch.backends.cudnn.benchmark)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert seen == [True]
    assert torch.backends.cudnn.benchmark == before


def test_it_is_for_gpus_and_not_for_deterministic_runs(tiny_config):
    speedup = speedup_named("cudnn-autotune")
    assert "uses a CPU" in speedup.reason_against(GPU, tiny_config())
    assert speedup.reason_against(GPU, tiny_config(train__device="cuda")) is None
    assert "train.deterministic" in speedup.reason_against(
        GPU, tiny_config(train__device="cuda", train__deterministic=True)
    )
