"""Where triton-ce is used, and the reason where it is not."""

from __future__ import annotations

import pytest

from flatout.assembly import conditions
from flatout.assembly.auto import is_measured
from flatout.assembly.selection import select
from flatout.config.schema import load_config
from flatout.errors import HardwareError
from flatout.hardware import Gpu, Machine
from flatout.speedups import triton_ce

CPU = Machine("a CPU", 2, 8.0, (), "3.11")


def gpu(capability):
    return Machine("a CPU", 2, 8.0, (Gpu("a GPU", 16.0, capability, "1"),), "3.11")


def decided(machine, *overrides, device="cuda"):
    chosen = select(
        load_config(None, [f"train.device={device}", *overrides]), machine, device=device
    )
    return {
        decision.name: (decision.on, decision.reason)
        for decision in chosen
        if decision.name in ("triton-ce", "chunked-ce")
    }


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(conditions, "find_spec", lambda name: object())


def test_it_predicts_its_gain_and_is_off_until_it_is_measured():
    found = decided(gpu((9, 0)))
    assert found["chunked-ce"][0]
    assert not found["triton-ce"][0]
    assert (
        is_measured(
            triton_ce.SPEEDUP, load_config(None, ["train.device=cuda"]), gpu((9, 0)), "cuda"
        )
        is False
    )
    assert "TB/s" in triton_ce.SPEEDUP.predicted


def test_named_on_a_gpu_it_takes_the_place_of_chunked_ce():
    found = decided(gpu((9, 0)), "speedups=auto,+triton-ce")
    assert found["triton-ce"][0]
    assert not found["chunked-ce"][0]


def test_on_a_cpu_it_is_refused():
    assert "needs an NVIDIA GPU" in decided(CPU, device="cpu")["triton-ce"][1]
    with pytest.raises(HardwareError, match="use chunked-ce there"):
        decided(CPU, "speedups=triton-ce", device="cpu")


def test_a_gpu_too_old_for_triton_is_named():
    assert (
        "Triton needs compute capability 7.0; the a GPU has 6.1"
        in decided(gpu((6, 1)))["triton-ce"][1]
    )


def test_without_triton_it_names_the_install_line(monkeypatch):
    monkeypatch.setattr(conditions, "find_spec", lambda name: None)
    with pytest.raises(HardwareError, match="pip install triton"):
        decided(gpu((9, 0)), "speedups=triton-ce")
