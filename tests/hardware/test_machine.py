import dataclasses
import subprocess
import sys
import types
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from flatout.config.registry import MACHINES
from flatout.errors import FlatoutError, HardwareError
from flatout.hardware import machine as hardware
from flatout.hardware.machine import Gpu, Machine

H200 = Gpu("NVIDIA H200", 139.8, (9, 0), "580.1")
WITH_GPU = Machine("Some CPU", 16, 128.0, (H200,), "3.11.7")
WITHOUT = dataclasses.replace(WITH_GPU, gpus=())


@pytest.mark.slow
def test_probing_does_not_import_torch():
    code = (
        "import sys, flatout.hardware.machine as h; m = h.probe(); "
        "print(m.cores, m.memory_gib, m.cpu_name); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    cores, memory_gib, cpu_name = done.stdout.split(" ", 2)
    assert int(cores) >= 1
    assert 0 < float(memory_gib) < 1e5
    assert cpu_name.strip()


def test_a_machine_without_a_driver_has_no_gpus_and_no_warning(monkeypatch):
    class NoLibrary(Exception):
        pass

    def refuse():
        raise NoLibrary

    monkeypatch.setitem(
        sys.modules, "pynvml", types.SimpleNamespace(NVMLError=NoLibrary, nvmlInit=refuse)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hardware.probe().gpus == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert hardware.probe().gpus == ()


def test_gpus_are_read_from_the_driver_which_is_shut_down(monkeypatch):
    closed = []
    driver = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlSystemGetDriverVersion=lambda: "580.65",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: ["NVIDIA H200", "Tesla T4"][handle],
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=(handle + 1) * 2**30),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, handle),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    machine = hardware.probe()
    assert machine.gpus == (
        Gpu("NVIDIA H200", 1.0, (9, 0), "580.65", "GPU-0"),
        Gpu("Tesla T4", 2.0, (9, 1), "580.65", "GPU-1"),
    )
    assert closed == [True]
    assert machine.row is not None
    assert machine.row.name == "h200"


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES.names())
def test_every_row_is_complete_and_plausible(name):
    stated = MACHINES.rows[name]
    row = hardware.row_of(stated["gpu_names"][0], stated["memory_gb"]["value"])
    assert row is not None
    assert row.name == name
    assert MACHINES.describe(name)
    figures = [row.memory_gb, row.bandwidth_gb_per_s, *row.peak_tflops.values()]
    sources = ("data sheet", "whitepaper", "product brief")
    assert all(
        figure.value > 0 and any(map(figure.source.__contains__, sources))
        for figure in [*figures, row.power_w or row.memory_gb]
    )
    assert set(row.peak_tflops) <= {"fp32", "tf32", "fp16", "bf16", "fp8"}
    peaks = {dtype: figure.value for dtype, figure in row.peak_tflops.items()}
    if "fp16" not in peaks:  # the data sheet has no rate of dense products
        return
    assert peaks["fp32"] <= peaks.get("tf32", peaks["fp16"]) <= peaks["fp16"]
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"] <= peaks.get("fp8", peaks["fp16"])


def test_similar_cards_are_distinguished():
    rows = {
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200 NVL": "h200-nvl",
        "NVIDIA L40": "l40",
        "NVIDIA L40S": "l40s",
        "NVIDIA GH200 480GB": "gh200-96gb",
        "NVIDIA GH200 144G HBM3e": "gh200-144gb",
        "NVIDIA H20": "h20",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
    }
    assert {gpu: hardware.row_of(gpu, 1.0).name for gpu in rows} == rows


@pytest.mark.parametrize(
    ("name", "memory_gib", "row"),
    [
        ("3080", 9.8, "rtx-3080-10gb"),
        ("3080", 10.0, "rtx-3080-10gb"),
        ("3080", 11.8, "rtx-3080-12gb"),
        ("3080", 20.0, None),
        ("4060 Ti", 7.6, "rtx-4060-ti-8gb"),
        ("4060 Ti", 15.6, "rtx-4060-ti-16gb"),
        ("5060 Ti", 7.5, "rtx-5060-ti-8gb"),
        ("5060 Ti", 15.5, "rtx-5060-ti-16gb"),
    ],
)
def test_cards_of_one_name_are_told_apart_by_memory(name, memory_gib, row):
    gpu = Gpu(f"NVIDIA GeForce RTX {name}", memory_gib, (8, 6), "580.1")
    assert (gpu.row and gpu.row.name) == row
    shared = ("3080", "4060 Ti", "5060 Ti")
    names = [name for row in hardware.machine_rows() for name in row.gpu_names]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {f"NVIDIA GeForce RTX {name}" for name in shared}


SIMILAR = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA H200 NVL2",
    "nvidia h200",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA H100",
    "NVIDIA H800 PCIe",
    "",
]


@pytest.mark.parametrize("name", SIMILAR)
def test_a_similar_name_is_another_gpu(name):
    assert hardware.row_of(name, 24.0) is None


def test_an_unknown_gpu_is_described_as_unknown():
    machine = dataclasses.replace(WITH_GPU, gpus=(dataclasses.replace(H200, name="Future 9000"),))
    assert machine.row is None
    assert "peak rates unknown" in machine.describe()
    assert "unknown" not in WITH_GPU.describe()
    assert WITHOUT.row is None


def write(folder: Path, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(hardware, "MEMBERSHIP", tmp_path / "cgroup")
    return tmp_path


def test_cgroup_v2_limits_apply_at_every_level(cgroups):
    (cgroups / "cgroup").write_text("0::/pod/box\n")
    write(cgroups / "fs", memory__max="max")
    write(cgroups / "fs/pod", cpu__max="350000 100000", memory__max=str(2**33))
    write(cgroups / "fs/pod/box", cpu__max="max 100000", memory__max=str(2**34))
    assert hardware.cgroup_limits() == (3, 2**33)


def test_cgroup_v1_limits_are_read(cgroups):
    (cgroups / "cgroup").write_text("4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/\n")
    write(cgroups / "fs/cpu/box", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(cgroups / "fs/memory/box", memory__limit_in_bytes="9223372036854771712")
    write(cgroups / "fs/memory", memory__limit_in_bytes=str(2**31))
    assert hardware.cgroup_limits() == (1, 2**31)


def test_without_a_container_there_is_no_limit(cgroups):
    write(cgroups / "fs/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert hardware.cgroup_limits() == (None, None)


@pytest.mark.parametrize(
    ("group", "files", "used_s"),
    [
        ("0::/box\n", {"cpu__max": "200000 100000", "cpu__stat": "usage_usec 1500000\nx 1"}, 1.5),
        ("0::/box\n", {"cpu__max": "800000 100000", "cpu__stat": "usage_usec 1500000"}, None),
        ("0::/box\n", {"cpu__max": "max 100000", "cpu__stat": "usage_usec 1500000"}, None),
    ],
)
def test_a_container_with_fewer_cores_counts_its_own_processes(
    cgroups, monkeypatch, group, files, used_s
):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(8)))
    (cgroups / "cgroup").write_text(group)
    write(cgroups / "fs/box", **files)
    assert hardware.limited_cpu_s() == used_s


def test_a_container_of_cgroups_v1_counts_its_own_processes(cgroups, monkeypatch):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(8)))
    (cgroups / "cgroup").write_text("2:cpu,cpuacct:/box\n")
    limit = {"cpu__cfs_quota_us": "200000", "cpu__cfs_period_us": "100000"}
    write(cgroups / "fs/cpu/box", **limit, cpuacct__usage="2500000000")
    assert hardware.limited_cpu_s() == 2.5


def test_only_the_cores_of_this_process_count(monkeypatch):
    """Others are busy on core 0. This process may use core 1 alone."""
    Core = namedtuple("scputimes", "user nice system idle iowait irq softirq steal guest")
    seconds = iter([(0.0, 0.0), (10.0, 4.0)])
    own = iter([(1.0, 0, 0, 0, 0), (4.5, 0, 0, 0, 0)])

    def cpu_times(percpu):
        return [Core(user, 0, 0, 10 - user, 1, 0, 0, 0, user) for user in next(seconds)]

    monkeypatch.setattr(hardware, "limited_cpu_s", lambda: None)
    monkeypatch.setattr(hardware.psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: {1})
    monkeypatch.setattr(hardware.os, "times", lambda: next(own))
    before, after = hardware.CpuTimes.read(), hardware.CpuTimes.read()
    assert (after.used_s - before.used_s, after.own_s - before.own_s) == (4.0, 3.5)
    assert before._replace(at_s=0.0).others_until(after._replace(at_s=5.0)) == 0.1


def test_probe_returns_the_smaller_of_affinity_and_limits(monkeypatch):
    monkeypatch.setattr(hardware, "cgroup_limits", lambda: (3, 2**30))
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(8)))
    machine = hardware.probe()
    assert (machine.cores, machine.memory_gib) == (3, 1.0)


def seen_by_torch(monkeypatch, *, count=0, cuda="13.0", warning=None):
    def available():
        if warning:
            warnings.warn(warning, stacklevel=1)
        return count > 0

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    ("machine", "torch_build", "reason"),
    [
        (WITHOUT, {}, "no NVIDIA driver"),
        (WITH_GPU, {"cuda": None}, "CPU build: install one for CUDA with `pip install"),
        (
            WITH_GPU,
            {"warning": "The NVIDIA driver on your system is too old.\nMore text"},
            "The NVIDIA driver on your system is too old",
        ),
        (WITH_GPU, {}, "CUDA_VISIBLE_DEVICES may hide them"),
    ],
)
def test_without_a_usable_gpu_auto_is_cpu_and_cuda_is_rejected(
    monkeypatch, machine, torch_build, reason
):
    seen_by_torch(monkeypatch, **torch_build)
    device, why = hardware.pick_device("auto", machine)
    assert device == "cpu"
    assert reason in why
    with pytest.raises(HardwareError, match="would run on the CPU") as caught:
        hardware.pick_device("cuda", machine)
    assert reason in caught.value.what


def test_with_a_gpu_auto_is_cuda(monkeypatch):
    seen_by_torch(monkeypatch, count=2)
    assert hardware.pick_device("auto", WITH_GPU) == ("cuda", "torch can use NVIDIA H200")
    assert hardware.pick_device("cuda:1", WITH_GPU)[0] == "cuda:1"
    assert hardware.pick_device("cpu", WITH_GPU) == ("cpu", "requested")
    with pytest.raises(HardwareError, match="There is no cuda:2: torch sees 2 GPUs"):
        hardware.pick_device("cuda:2", WITH_GPU)


def test_torch_numbers_the_gpus_of_a_machine(monkeypatch):
    """CUDA_VISIBLE_DEVICES=2,0 hides one and swaps the others, and the driver does not."""
    names = [f"GPU-{number}" for number in range(3)]
    gpus = tuple(Gpu(name, 80.0, (9, 0), "580.1", name) for name in names)
    machine, seen = dataclasses.replace(WITH_GPU, gpus=gpus), ["2", "0"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda at: types.SimpleNamespace(uuid=seen[at])
    )
    found = hardware.as_torch_sees(machine, "cuda:1")
    assert [gpu.name for gpu in found.gpus] == ["GPU-2", "GPU-0"]
    assert hardware.as_torch_sees(machine, "cpu") == machine
    seen[1] = "a part of one"
    assert hardware.as_torch_sees(machine, "cuda") == machine


def test_mps_is_used_only_on_request_and_named_as_untried(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(HardwareError, match=r"train\.device=mps cannot be used.*a Mac"):
        hardware.pick_device("mps", WITHOUT)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device, reason = hardware.pick_device("mps", WITHOUT)
    assert device == "mps"
    assert "never been run" in reason
    assert hardware.pick_device("auto", WITHOUT)[0] == "cpu"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("cdua", "Did you mean 'cuda'"), ("cuda:x", "Known: auto"), ("tpu:3", "Known: auto")],
)
def test_an_unknown_device_is_rejected(wrong, hint):
    with pytest.raises(HardwareError, match=hint):
        hardware.pick_device(wrong, WITH_GPU)


def test_the_fingerprint_contains_the_number_of_threads():
    threads = torch.get_num_threads()
    first = hardware.fingerprint()
    try:
        torch.set_num_threads(threads + 1)
        second = hardware.fingerprint()
    finally:
        torch.set_num_threads(threads)
    assert {key for key in first if first[key] != second[key]} == {"threads"}
    assert first["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("text", "count", "row"),
    [
        ("8x H100", 8, "h100-sxm"),
        ("h100-pcie", 1, "h100-pcie"),
        ("2 × RTX 4090", 2, "rtx-4090"),
        ("4*NVIDIA A100-SXM4-80GB", 4, "a100-sxm-80gb"),
        ("RTX 3080 12GB", 1, "rtx-3080-12gb"),
        ("geforce rtx 3090", 1, "rtx-3090"),
        ("2x h200-n", 2, "h200-nvl"),
    ],
)
def test_a_machine_is_named_by_row_driver_or_short_name(text, count, row):
    machine = hardware.machine_named(text)
    assert (len(machine.gpus), machine.row.name, machine.is_here) == (count, row, False)
    assert machine.gpus[0].memory_gib == pytest.approx(machine.row.memory_gb.value * 1e9 / 2**30)
    assert machine.gpus[0].compute_capability == machine.row.compute_capability


def test_several_machines_have_a_network_between_them():
    machine = hardware.machine_named("4x8 H100, 400 Gb/s")
    assert (len(machine.gpus), machine.gpus_per_node) == (32, 8)
    assert machine.network_gbit_per_s == 400
    assert hardware.machine_named("8x RTX 3090").gpus_per_node == 8
    assert machine.row.link_gb_per_s.value == 450


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("8x8 H100, fast", "'8x8 H100, 400 Gb/s'"),
        ("8x8 H100, 0 Gb/s", "'8x8 H100, 400 Gb/s'"),
        ("H1000", "Did you mean 'H100'"),
        ("A800", "a800-sxm-80gb"),
        ("RTX 3080", "rtx-3080-10gb, rtx-3080-12gb"),
        ("0x H100", "'8x H100'"),
    ],
)
def test_an_unknown_machine_is_an_error_with_the_nearest(text, fix):
    with pytest.raises(FlatoutError) as caught:
        hardware.machine_named(text)
    assert fix in caught.value.fix


def test_each_short_name_belongs_to_one_row_and_each_capability_is_known():
    rows = hardware.machine_rows()
    words = [{hardware._word(name) for name in (row.name, *row.short_names)} for row in rows]
    assert sum(map(len, words)) == len(set().union(*words))
    assert all(row.compute_capability for row in rows)
