"""What the driver reports becomes facts about the GPU. What it does not report stays unknown."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from flatout.hardware.machine import GIB
from flatout.measure.host import gpu_facts

MACHINE = SimpleNamespace(gpus=["a GPU"])
OWN = SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)
OTHER = SimpleNamespace(pid=-1, usedGpuMemory=2 * GIB)
ANSWERS = {
    "CurrentClocksEventReasons": lambda handle: 0x44,
    "ComputeRunningProcesses": lambda handle: [OWN, OTHER],
    "ClockInfo": lambda handle, kind: 900,
    "MaxClockInfo": lambda handle, kind: 1200,
    "EnforcedPowerLimit": lambda handle: 300,
    "PowerManagementDefaultLimit": lambda handle: 600,
}


class Refused(Exception):
    pass


def refuse(*_):
    raise Refused


@pytest.fixture
def driver(monkeypatch):
    made = SimpleNamespace(
        NVMLError=Refused,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        **{f"nvmlDeviceGet{name}": refuse for name in ANSWERS},
    )
    properties = SimpleNamespace(uuid="abc", name="a GPU", major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_the_driver_reports_a_gpu(driver):
    for name, answer in ANSWERS.items():
        setattr(driver, f"nvmlDeviceGet{name}", answer)
    found = gpu_facts(MACHINE, "cuda")
    assert found == {
        "supports_bf16": True,
        "slowed_by": ("its power cap", "heat"),
        "gpu_others": 1,
        "gpu_others_gib": 2.0,
        "clock_share": 0.75,
        "power_limit_share": 0.5,
    }


def test_in_a_container_this_process_is_one_of_those_that_the_driver_lists(driver, monkeypatch):
    """The numbers are those of the host."""
    listed = [SimpleNamespace(pid=-1, usedGpuMemory=3 << 30)]
    driver.nvmlDeviceGetComputeRunningProcesses = lambda handle: listed
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    assert gpu_facts(MACHINE, "cuda")["gpu_others"] == 0
    listed.append(SimpleNamespace(pid=-2, usedGpuMemory=40 << 30))
    found = gpu_facts(MACHINE, "cuda")
    assert (found["gpu_others"], found["gpu_others_gib"]) == (1, 40.0)


def test_what_the_driver_does_not_report_is_unknown(driver):
    assert gpu_facts(MACHINE, "cuda") == {"supports_bf16": True}
    driver.nvmlInit = refuse
    assert gpu_facts(MACHINE, "cuda") == {"supports_bf16": True}
    assert gpu_facts(MACHINE, "cpu") == {}
