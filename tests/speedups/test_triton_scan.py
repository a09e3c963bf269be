"""Where triton-scan is used, and the reason where it is not."""

import pytest

from flatout.assembly import speedup
from flatout.assembly.choices import select
from flatout.config.schema import load_config
from flatout.errors import HardwareError
from flatout.hardware.machine import Gpu, Machine

CPU = Machine("a CPU", 2, 8.0, (), "3.11")


def gpu(capability):
    return Machine("a CPU", 2, 8.0, (Gpu("a GPU", 16.0, capability, "1"),), "3.11")


def decided(machine, *overrides, device="cuda"):
    words = ["model.kind=eigenstate", f"train.device={device}", *overrides]
    chosen = select(load_config(None, words), machine, device=device)
    return {each.name: (each.on, each.reason) for each in chosen}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(speedup, "find_spec", lambda name: object())


def test_auto_uses_it_on_a_gpu():
    found = decided(gpu((9, 0)))
    assert found["triton-scan"][0]


@pytest.mark.parametrize(
    ("machine", "overrides", "reason"),
    [
        (CPU, ["train.device=cpu"], "needs an NVIDIA GPU of compute capability 7.0"),
        (gpu((6, 1)), [], "needs compute capability 7.0. The a GPU has 6.1."),
        (gpu((9, 0)), ["model.kind=transformer"], "makes no use of scan"),
    ],
)
def test_where_it_cannot_run_a_reason_is_given(machine, overrides, reason):
    found = decided(machine, *overrides, device="cuda" if machine.gpus else "cpu")
    on, why = found["triton-scan"]
    assert not on
    assert reason in why


def test_without_triton_it_names_the_install_line(monkeypatch):
    monkeypatch.setattr(speedup, "find_spec", lambda name: None)
    found = decided(gpu((9, 0)))
    assert "pip install triton" in found["triton-scan"][1]
    with pytest.raises(HardwareError, match="pip install triton"):
        decided(gpu((9, 0)), "speedups=triton-scan")
