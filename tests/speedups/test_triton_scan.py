"""Where triton-scan is used, and the reason where it is not."""

from __future__ import annotations

import pytest

from flatout.assembly import conditions
from flatout.assembly.selection import select
from flatout.config.schema import load_config
from flatout.errors import HardwareError
from flatout.hardware import Gpu, Machine

CPU = Machine("a CPU", 2, 8.0, (), "3.11")


def gpu(capability):
    return Machine("a CPU", 2, 8.0, (Gpu("a GPU", 16.0, capability, "1"),), "3.11")


def decided(machine, *overrides, device="cuda"):
    chosen = select(
        load_config(None, ["model.kind=eigenstate", f"train.device={device}", *overrides]),
        machine,
        device=device,
    )
    return {
        decision.name: (decision.on, decision.reason)
        for decision in chosen
        if decision.name in ("triton-scan", "fast-scan")
    }


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(conditions, "find_spec", lambda name: object())


def test_auto_prefers_it_to_fast_scan_on_a_gpu():
    found = decided(gpu((9, 0)))
    assert found["triton-scan"][0]
    assert found["fast-scan"] == (False, "triton-scan is on and replaces it")


def test_on_a_cpu_fast_scan_stays():
    found = decided(CPU, device="cpu")
    assert found["fast-scan"][0]
    assert found["triton-scan"][0] is False
    assert "needs an NVIDIA GPU of compute capability 7.0" in found["triton-scan"][1]


def test_a_gpu_too_old_for_triton_is_named():
    assert decided(gpu((6, 1)))["triton-scan"] == (
        False,
        "Triton needs compute capability 7.0; the a GPU has 6.1. Use fast-scan instead.",
    )


def test_without_triton_it_names_the_install_line_and_fast_scan_stays(monkeypatch):
    monkeypatch.setattr(conditions, "find_spec", lambda name: None)
    found = decided(gpu((9, 0)))
    assert "pip install triton" in found["triton-scan"][1]
    assert found["fast-scan"][0]
    with pytest.raises(HardwareError, match="pip install triton"):
        decided(gpu((9, 0)), "speedups=triton-scan")


def test_a_transformer_does_not_use_it():
    assert (
        "makes no use of ops.scan"
        in decided(gpu((9, 0)), "model.kind=transformer")["triton-scan"][1]
    )
