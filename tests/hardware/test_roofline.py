import dataclasses
from types import SimpleNamespace

import pytest
import torch

from flatout.hardware import machine as hardware
from flatout.hardware import roofline
from flatout.hardware.machine import Gpu, Machine
from flatout.hardware.roofline import Peak

H200 = Gpu("NVIDIA H200", 139.8, (9, 0), "580.1")
WITH_GPU = Machine("Some CPU", 16, 128.0, (H200,), "3.11.7")


def seen_by_torch(monkeypatch, *, count=0):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    h200 = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=0: h200)


@pytest.mark.slow
def test_measuring_a_cpu_keeps_the_random_state():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tflops = roofline.measure("cpu", "fp32")[0]
    assert 1e-4 < tflops < 100
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_a_cpu_has_a_measured_peak():
    peak = roofline.peak_tflops(WITH_GPU, "cpu", "fp32")
    assert peak is not None
    assert peak.source.startswith("measured here, matmul ")
    assert peak.source.endswith("³, fp32")


def test_a_known_gpu_has_the_peak_of_its_data_sheet(monkeypatch):
    seen_by_torch(monkeypatch, count=1)
    peak = roofline.peak_tflops(dataclasses.replace(WITH_GPU, gpus=()), "cuda", "bf16")
    assert peak is not None
    assert peak.tflops == 989.5
    assert peak.source.startswith("data sheet: NVIDIA H200 Tensor Core GPU data sheet, H200 SXM")


def test_without_torch_the_name_comes_from_the_driver(monkeypatch):
    seen_by_torch(monkeypatch)
    peak = roofline.peak_tflops(WITH_GPU, "cuda", "fp8")
    assert peak is not None
    assert peak.tflops == 1979


def test_a_rate_missing_from_the_data_sheet_is_measured_or_unknown(monkeypatch):
    monkeypatch.setattr(roofline, "measure", lambda device, dtype: (1.5, 4096))
    seen_by_torch(monkeypatch)
    old = dataclasses.replace(WITH_GPU, gpus=(dataclasses.replace(H200, name="Tesla T4"),))
    assert roofline.peak_tflops(old, "cuda", "bf16") == Peak(
        1.5, "measured here, matmul 4096³, bf16"
    )
    assert roofline.peak_tflops(old, "cuda", "fp8") is None


@pytest.mark.gpu
def test_a_gpu_is_not_faster_than_its_data_sheet():
    machine = hardware.probe()
    assert machine.gpus
    device, _ = hardware.pick_device("auto", machine)
    before = torch.get_float32_matmul_precision()
    peak = roofline.peak_tflops(machine, device, "bf16")
    if machine.row is not None and peak is not None:
        # Other tests use the GPU at the same time.
        assert 0.05 < roofline.measure(device, "bf16")[0] / peak.tflops < 1.1
    assert roofline.measure(device, "tf32")[0] > 1.5 * roofline.measure(device, "fp32")[0]
    assert torch.get_float32_matmul_precision() == before
