"""This machine: what it has, what its data sheet promises, what it reaches here and now. What is
not known is said to be unknown.

Nothing here imports torch before a function that needs it is called.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flatout.config.sections import Section
from flatout.errors import HardwareError
from flatout.registry import MACHINES, nearest

GIB = 2**30
CUDA_TORCH = "pip install --force-reinstall torch"
"""On Linux the package index's own torch is a CUDA build."""


class Figure(Section):
    """A number of a data sheet."""

    value: float
    """The number, in the unit its key names."""
    source: str
    """Where it is printed."""


class MachineRow(Section):
    """One file of machines/*.yaml: what a GPU's data sheet states. Rates are dense, without
    sparsity.
    """

    name: str
    """The file's name."""
    gpu_names: tuple[str, ...]
    """What the driver calls this GPU, letter for letter; a similar name is another GPU."""
    memory_gb: Figure
    """Memory, 10^9 bytes as data sheets count."""
    bandwidth_gb_per_s: Figure
    """Memory bandwidth."""
    peak_tflops: dict[str, Figure]
    """Dense matrix-product rate for fp32, tf32, fp16, bf16, fp8; what is missing the GPU has no
    units for.
    """


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it."""

    name: str
    memory_gib: float
    compute_capability: tuple[int, int]
    driver: str
    uuid: str | None = None


@dataclass(frozen=True)
class Machine:
    """One machine: what this process may use of it."""

    cpu_name: str
    cores: int
    memory_gib: float
    gpus: tuple[Gpu, ...]
    python: str
    cpu_multiplies_bf16: bool = False
    """Whether its processor has instructions for products in bfloat16."""

    @property
    def row(self) -> MachineRow | None:
        """The data sheet of the first GPU; None when there is no GPU or its name is in no row."""
        return row_of(self.gpus[0].name) if self.gpus else None

    def describe(self) -> str:
        """Return one line for a person."""
        parts = [f"{self.cpu_name}, {self.cores} cores, {self.memory_gib:.0f} GiB"]
        parts += [
            f"{gpu.name}, {gpu.memory_gib:.0f} GiB"
            + ("" if row_of(gpu.name) else " (peak rates unknown)")
            for gpu in self.gpus
        ]
        return "; ".join(parts)


@dataclass(frozen=True)
class Peak:
    """The rate that 100% stands for, and where the number comes from."""

    tflops: float
    source: str


@functools.cache
def row_of(gpu_name: str) -> MachineRow | None:
    """Return the row of machines/*.yaml for a GPU's exact name, or None: a guessed peak is worse
    than an unknown one.
    """
    for name in MACHINES.names():
        document = MACHINES.get(name)
        if gpu_name in document["gpu_names"]:
            return MachineRow.model_validate({"name": name, **document})
    return None


def probe() -> Machine:
    """Return what this process may use: affinity and container limits count, not the board's
    totals.
    """
    cgroup_cores, cgroup_bytes = cgroup_limits()
    memory_bytes = min(psutil.virtual_memory().total, cgroup_bytes or 2**63)
    cores = min(usable_cores(), cgroup_cores or 2**31)
    return Machine(
        _cpu_name(),
        cores,
        memory_bytes / GIB,
        _gpus(),
        platform.python_version(),
        _multiplies_bf16(),
    )


def _multiplies_bf16() -> bool:
    """As Linux says it of an x86 processor; Arm has such instructions too, and what they gain there
    is not measured.
    """
    return bool({"avx512_bf16", "amx_bf16"} & set(_read(Path("/proc/cpuinfo")).split()))


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> tuple[int | None, int | None]:
    """Return (cores, bytes) a container allows, None where it sets no limit. Reads both versions of
    control groups.
    """
    paths = {"": "/"}
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    cores: list[float] = []
    sizes: list[int] = []
    for folder in _with_parents(root, paths[""]):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores.append(int(quota) / int(period))
        sizes += _number(folder / "memory.max")
    for folder in _with_parents(root / "cpu", paths.get("cpu", "/")):
        for quota_us, period_us in zip(
            _number(folder / "cpu.cfs_quota_us"),
            _number(folder / "cpu.cfs_period_us"),
            strict=False,
        ):
            cores.append(quota_us / period_us)
    for folder in _with_parents(root / "memory", paths.get("memory", "/")):
        sizes += [
            size for size in _number(folder / "memory.limit_in_bytes") if size < 2**60
        ]  # version 1 writes "no limit" as about 2^63
    return (max(1, int(min(cores))) if cores else None, min(sizes) if sizes else None)


def pick_device(wanted: str, machine: Machine) -> tuple[str, str]:
    """Return (device, why) for `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises: HardwareError for another name, or when a GPU is asked for and cannot be used.
    """
    if wanted == "cpu":
        return "cpu", "asked for"
    check_device_name(wanted)
    obstacle = _cuda_obstacle(machine)
    on_cpu = f"train.device=auto would run on the CPU ({machine.cpu_name}, {machine.cores} cores)"
    if obstacle is not None:
        if wanted == "auto":
            return "cpu", obstacle
        raise HardwareError(
            f"train.device={wanted} cannot be used: {obstacle}.",
            fix=f"Repair that, or leave it out: {on_cpu}.",
        )
    import torch

    count = torch.cuda.device_count()
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        raise HardwareError(
            f"There is no {wanted}: torch sees {count} GPU{'s' if count > 1 else ''}.",
            fix=f"Use cuda:0 to cuda:{count - 1}.",
        )
    name = torch.cuda.get_device_name(index)
    return ("cuda", f"torch can use {name}") if wanted == "auto" else (wanted, f"asked for: {name}")


def check_device_name(wanted: str) -> None:
    """Do nothing when `wanted` is auto, cpu, cuda or cuda:N.

    Raises: HardwareError with the nearest of them.
    """
    if wanted not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", wanted):
        guess = (
            "cuda" if wanted.lower().startswith("gpu") else nearest(wanted, ["auto", "cpu", "cuda"])
        )
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise HardwareError(
            f"train.device={wanted!r} is not a device.",
            fix=f"{hint}Known: auto, cpu, cuda, cuda:N.",
        )


def measure_roof(device: str, dtype: str) -> float:
    """Return the TFLOP/s of a square matrix product here and now: the best of several, in at most
    about half a second.

    Raises: HardwareError when `dtype` is none of fp32, tf32, fp16, bf16.
    """
    return _roof(device, dtype)[0]


def peak_tflops(machine: Machine, device: str, dtype: str) -> Peak | None:
    """Return the rate that 100% stands for: the data sheet's where this GPU has a row, else one
    measured here.

    None, unknown, is left for a dtype that no plain matrix product can measure (fp8) on a GPU
    without a row.
    """
    row = _row_of_device(machine, device) if device.startswith("cuda") else None
    if row is not None and dtype in row.peak_tflops:
        figure = row.peak_tflops[dtype]
        return Peak(figure.value, f"data sheet: {figure.source}")
    if dtype not in ROOF_DTYPES:
        return None
    tflops, size = _roof(device, dtype)
    return Peak(tflops, f"measured here, matmul {size}³, {dtype}")


def fingerprint(device: str = "cpu") -> dict[str, str | int]:
    """Return what a bit-exact resume depends on; two runs with different fingerprints may differ in
    the last bits.
    """
    import torch

    found: dict[str, str | int] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_name": _cpu_name(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
    }
    if device.startswith("cuda"):
        found |= {"cuda": str(torch.version.cuda), "cudnn": _cudnn_version(torch.backends.cudnn)}
    return found


ASSUMED_MFU = 0.3
"""Share of the peak that a run is assumed to reach when its length is guessed."""
ROOF_DTYPES = ("fp32", "tf32", "fp16", "bf16")


def _roof(device: str, dtype: str) -> tuple[float, int]:
    """The matrices grow until one product takes a fair share of the time; their values are random,
    since zeros draw less power.
    """
    import torch

    if dtype not in ROOF_DTYPES:
        raise HardwareError(
            f"The rate of {dtype!r} cannot be measured.", fix=f"Known: {', '.join(ROOF_DTYPES)}."
        )
    on_cuda = device.startswith("cuda")
    sizes, share_s = ((1024, 2048, 4096, 8192), 0.02) if on_cuda else ((512, 1024, 2048), 0.05)
    with torch.no_grad(), _matmul_precision(dtype, on_cuda):
        size = sizes[0]
        seconds = _matmul_s(device, dtype, size, repeats=2)
        for larger in sizes[1:]:
            if seconds * (larger / size) ** 3 > share_s:
                break
            size, seconds = larger, _matmul_s(device, dtype, larger, repeats=2)
        repeats = max(1, min(10, int(4 * share_s / seconds)))
        seconds = min(seconds, _matmul_s(device, dtype, size, repeats=repeats))
    return 2 * size**3 / seconds / 1e12, size


def _matmul_s(device: str, dtype: str, size: int, repeats: int) -> float:
    """Seconds of the fastest product, after one of each kind that is not counted."""
    import torch

    generator = torch.Generator(device).manual_seed(
        0
    )  # its own: the global stream belongs to the run
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).to(kind) for _ in range(2)
    )
    best = float("inf")
    for product in _products(device, dtype):
        product(left, right)
        for _ in range(repeats):
            _wait(device)
            start = time.perf_counter()
            product(left, right)
            _wait(device)
            best = min(best, time.perf_counter() - start)
    return best


def _products(device: str, dtype: str) -> list[Callable[[Any, Any], Any]]:
    """The ways torch has to multiply two matrices; on a CPU fp32 goes to MKL, and on request to
    oneDNN, which can be twice as fast.
    """
    import torch

    if device == "cpu" and dtype == "fp32" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return [
            torch.mm,
            lambda left, right: torch.ops.mkldnn._linear_pointwise(
                left, right, None, "none", [], ""
            ),
        ]
    return [torch.mm]


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@contextmanager
def _matmul_precision(dtype: str, on_cuda: bool) -> Iterator[None]:
    """fp32 on CUDA means fp32, whatever the run has set; it is put back afterwards."""
    import torch

    before = torch.get_float32_matmul_precision()
    if on_cuda:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        if on_cuda:
            torch.set_float32_matmul_precision(before)


def _cudnn_version(cudnn: Any) -> int:
    return int(cudnn.version() or 0)


def _row_of_device(machine: Machine, device: str) -> MachineRow | None:
    """Torch numbers GPUs as CUDA_VISIBLE_DEVICES says, the driver as the board does: ask torch
    where it can answer.
    """
    import torch

    return row_of(torch.cuda.get_device_name(device)) if torch.cuda.is_available() else machine.row


def _cuda_obstacle(machine: Machine) -> str | None:
    """Why torch cannot use a GPU, or None when it can. Torch says some of its reasons as warnings."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if not machine.gpus:
        return "no NVIDIA driver, or no GPU behind it"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is a CPU build: install one for CUDA with `{CUDA_TORCH}`"
    if caught:
        return str(caught[0].message).split("\n", 1)[0].rstrip(". ")
    return f"torch sees none of this machine's {len(machine.gpus)} GPUs: CUDA_VISIBLE_DEVICES may hide them"


def _gpus() -> tuple[Gpu, ...]:
    """What the driver reports; no driver or no library is simply no GPU."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int, driver: str) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory_gib = pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB
    return Gpu(
        _text(pynvml.nvmlDeviceGetName(handle)),
        memory_gib,
        (int(major), int(minor)),
        driver,
        _text(pynvml.nvmlDeviceGetUUID(handle)),
    )


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _with_parents(root: Path, path: str) -> list[Path]:
    """A limit binds at any level, and inside a container the own level may be mounted as the root."""
    place = root / path.lstrip("/")
    return [
        folder for folder in (place, *place.parents) if folder == root or root in folder.parents
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path) -> list[int]:
    """The file's number in a list, or an empty list: no file, "max" and -1 are no limit."""
    text = _read(path).strip()
    return [int(text)] if text.isdigit() else []
