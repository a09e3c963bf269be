"""`diagnose` without a recipe describes the machine, with measured rates."""

from __future__ import annotations

import sys

import pytest

from flatout.cli.commands.diagnose import diagnose
from flatout.errors import MissingPackage
from flatout.hardware import machine as hardware
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.diagnose import machine

DEAD = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA L4", 22.0, (8, 9), "580.1"),), "3.11")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(machine, "measure", lambda device, dtype: (0.25, 512))
    monkeypatch.setattr(machine, "copy_rate", lambda device: 12.0)


def test_a_machine_is_described_with_measured_rates():
    found = diagnose()
    text = found.summary()
    assert "GPU          none that torch can use: no NVIDIA driver, or no GPU behind it" in text
    assert "Matmuls      0.25 TFLOP/s in fp32, 0.25 TFLOP/s in bf16, measured" in text
    assert "Copies       12 GB/s, measured" in text
    assert found.exit_code == 0


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_busy_machine_is_said_to_be_so_once(monkeypatch, is_busy):
    plain = machine.host_facts
    facts = {"other_busy_cores": 2.0 * is_busy, "cores": 2, "threads": 2}
    monkeypatch.setattr(machine, "host_facts", lambda folder: plain(folder) | facts)
    found = diagnose()
    assert found.summary().count("busy") == 2 * is_busy  # one is the name of the finding
    assert ("kept 2.0 of 2 cores busy" in found.verdict) == is_busy


def test_a_gpu_that_torch_cannot_use_is_a_finding(monkeypatch):
    for module in (machine, hardware):
        monkeypatch.setattr(module, "probe", lambda: DEAD)
    found = diagnose()
    assert "this torch" in dict(found.about)["GPU"]
    assert "cpu-by-mistake" in {one.name for one in found.findings}


def test_a_torch_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "flatout.measure.diagnose.machine")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackage, match="torch cannot be imported"):
        diagnose()
