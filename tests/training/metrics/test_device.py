"""Memory of the process, and what a GPU's driver reports."""

import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from flatout.hardware.machine import CpuTimes
from flatout.training.metrics import device as module
from flatout.training.metrics.device import GpuDriver, memory_gib, process_gib, slowed_by


def test_memory_of_the_process_counts_what_it_allocates():
    before = process_gib()
    if before is None:
        pytest.skip("this system has no /proc")
    # Not torch.ones: malloc may still hold memory that an earlier test freed.
    with mmap.mmap(-1, 2**28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for _ in range(2**8):
            memory.write(b"1" * 2**20)
        assert process_gib() - before == pytest.approx(0.25, abs=0.05)


def test_other_processes_are_measured_once_a_second(monkeypatch):
    times = iter([CpuTimes(0.0, 10.0, 5.0), CpuTimes(2.0, 13.5, 6.5)])
    monkeypatch.setattr(module.CpuTimes, "read", lambda: next(times))
    now = iter([0.9, 2.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    others = module.OtherProcesses()
    assert others.figures(cores=2) == {}
    assert others.figures(cores=2) == {"cpu/other_cores": 1.0, "cpu/cores": 2}


def test_a_system_without_proc_leaves_the_number_out(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "OWN_PAGES", tmp_path / "missing")
    assert process_gib() is None
    assert set(memory_gib(torch.device("cpu"))) == {"mem/peak_gib"}


def test_heat_is_named_once_and_the_power_cap_is_no_fault():
    assert slowed_by(0x20 | 0x40 | 0x80) == ("heat", "the power supply")
    assert slowed_by(0x04) == ()
    assert slowed_by(None) is None


def test_a_cpu_has_no_driver():
    assert GpuDriver(torch.device("cpu")).state() is None


class Error(Exception):
    pass


def driver(**functions):
    def fail(*_):
        raise Error

    names = ("CurrentClocksEventReasons", "ClockInfo")
    made = {f"nvmlDeviceGet{name}": functions.get(name, fail) for name in names}
    return SimpleNamespace(
        NVMLError=Error,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        **made,
    )


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc")
    )
    return torch.device("cuda")


def test_the_driver_reports_a_gpu(monkeypatch, gpu):
    answers = driver(
        CurrentClocksEventReasons=lambda handle: 0x44, ClockInfo=lambda handle, kind: 1200
    )
    monkeypatch.setitem(sys.modules, "pynvml", answers)
    assert GpuDriver(gpu).state() == (("heat",), True, 1200.0)


def test_what_the_driver_does_not_report_is_unknown(monkeypatch, gpu):
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    assert GpuDriver(gpu).state() == (None, None, None)
