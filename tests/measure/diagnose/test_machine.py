"""`diagnose` without a recipe looks at the machine; with one, it also says what passed."""

from __future__ import annotations

import sys

import pytest

from flatout.cli.commands.diagnose import diagnose
from flatout.errors import MissingPackage
from flatout.hardware import machine as hardware
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.diagnose import machine
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.steps.evidence import DataFacts, Evidence, HostFacts, Phases, Roofline

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
    assert "environment" in dict(found.about)["Passed"]
    assert "disk space" not in dict(found.about)["Passed"], "no run says how much it needs"
    assert found.exit_code == 0


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


def test_a_measured_run_says_its_length_its_data_its_rating_and_what_passed():
    evidence = Evidence(
        source="measured run",
        step_s=0.1,
        planned_steps=36_000,
        epochs=2.5,
        data=DataFacts(train_tokens=1_000_000, val_tokens=10_000),
        phases=Phases(data_wait_s=0.06, gc_s=0.0),
        host=HostFacts(threads=2),
        roofline=Roofline(tokens_per_s=750.0, expected_tokens_per_s=1000.0),
    )
    about = dict(diagnosis_of(evidence).about)
    assert about["Training"] == "about 1 h 00 min for 36,000 steps"
    assert about["Dataset"] == "1,000,000 tokens, read 2.5 times, and 10,000 for validation"
    assert about["Rating"] == "good: 75% of the tokens/s that this device should give"
    assert "garbage collection" in about["Passed"]
    assert "data wait" not in about["Passed"], "it is a finding"
    assert "recompiling" not in about["Passed"], "it was not measured"
