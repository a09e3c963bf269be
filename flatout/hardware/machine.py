"""This machine: its CPU, memory and GPUs, and their data sheets. What is unknown stays unknown.

torch is imported only inside the functions that need it.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from flatout.config.registry import MACHINES, nearest
from flatout.config.sections import Section
from flatout.errors import ConfigError, HardwareError
from flatout.progress import counted

GIB = 2**30
ASSUMED_MFU = 0.3
"""Share of the peak that a run is assumed to reach when its length is estimated."""
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CUDA_TORCH = "pip install --force-reinstall torch"
"""On Linux, the default torch of the package index is a CUDA build."""


class Figure(Section):
    """A number from a data sheet."""

    value: float
    """The number, in the unit its key names."""
    source: str
    """Where it is published."""


class MachineRow(Section):
    """A row of machines.yaml: a GPU's data sheet. Rates are dense, without sparsity."""

    name: str
    """The name of the row."""
    description: str
    """What `flatout list machines` shows."""
    gpu_names: tuple[str, ...]
    """The exact names that drivers report for this GPU. A similar name is a different GPU."""
    memory_gb: Figure
    """Memory in 10^9 bytes, as in data sheets."""
    bandwidth_gb_per_s: Figure
    """Memory bandwidth."""
    peak_tflops: dict[str, Figure]
    """Rate of dense matmuls in fp32, tf32, fp16, bf16 and fp8. A missing dtype has no
    hardware units.
    """
    power_w: Figure | None = None
    """Highest power of the board. None if unknown."""
    short_names: tuple[str, ...] = ()
    """Names by which people ask for it, such as H100. Each belongs to one row."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability. None if unknown."""
    link_gb_per_s: Figure | None = None
    """Rate of its links to other GPUs of the machine, in each direction. None without such links.
    """


@dataclass(frozen=True)
class Gpu:
    """A GPU as reported by its driver."""

    name: str
    memory_gib: float
    compute_capability: tuple[int, int]
    driver: str
    uuid: str | None = None

    @property
    def row(self) -> MachineRow | None:
        """Its data sheet. None if its name is unknown."""
        return row_of(self.name, self.memory_gib)


@dataclass(frozen=True)
class Machine:
    """A machine, as far as this process may use it."""

    cpu_name: str
    cores: int
    memory_gib: float
    gpus: tuple[Gpu, ...]
    python: str
    cpu_multiplies_bf16: bool = False
    """Whether its CPU has instructions for bfloat16 matmuls."""
    is_here: bool = True
    """Whether this process runs on it. False for a machine that is only planned for."""
    gpus_per_node: int = 1_000_000
    """GPUs of each of several machines that are planned for together."""
    network_gbit_per_s: float | None = None
    """Rate of the network between them for each GPU, in each direction. None if not stated."""

    @property
    def row(self) -> MachineRow | None:
        """The data sheet of the first GPU. None without a GPU or if its name is unknown."""
        return self.gpus[0].row if self.gpus else None

    @property
    def gpu_dtype(self) -> Literal["bf16", "fp16"]:
        """The 16-bit dtype that its GPUs multiply fast: fp16 on those before Ampere."""
        peaks = self.row.peak_tflops if self.row else {}
        if peaks.keys() & {"bf16", "fp16"}:
            return "bf16" if "bf16" in peaks else "fp16"
        return "bf16" if self.gpus and self.gpus[0].compute_capability >= (8, 0) else "fp16"

    def describe(self) -> str:
        """Return a one-line description."""
        parts = [f"{self.cpu_name}, {counted(self.cores, 'core')}, {self.memory_gib:.0f} GiB"]
        parts += [
            f"{gpu.name}, {gpu.memory_gib:.0f} GiB" + ("" if gpu.row else " (peak rates unknown)")
            for gpu in self.gpus
        ]
        return "; ".join(parts)


@functools.cache
def row_of(gpu_name: str, memory_gib: float) -> MachineRow | None:
    """Return the row of machines.yaml with a GPU's exact name, or None.

    Of several with one name, it is the one with about that memory. A guessed peak would be worse
    than an unknown one.
    """
    named = [row for row in machine_rows() if gpu_name in row.gpu_names]
    apart = [abs(memory_gib / row.memory_gb.value - 1) for row in named]
    if len(named) < 2 or min(apart) >= SAME_MEMORY:
        return named[0] if len(named) == 1 else None
    return named[apart.index(min(apart))]


@functools.cache
def machine_rows() -> tuple[MachineRow, ...]:
    """Return the rows of machines.yaml."""
    rows = MACHINES.rows.items()
    return tuple(MachineRow.model_validate({"name": name, **row}) for name, row in rows)


def machine_named(text: str) -> Machine:
    """Return the machine that a text such as `8x H100` describes, with GPUs of machines.yaml.

    `8x8 H100, 400 Gb/s` are eight machines of eight, with a network of 400 Gb/s for each GPU. CPU
    and memory are unknown.
    Raises: ConfigError with the nearest name when no row has that name.
    """
    count_and_name = r"\s*(?:(\d{1,6})\s*[x×*]\s*(?:(\d{1,2})\s+)?)?([^\s,][^,]*)"
    form = count_and_name + r"(?:,\s*(\d+(?:\.\d+)?)\s*Gb(?:it)?/s\s*)?"
    found = re.fullmatch(form, text)
    if found is None or not all(float(count or 1) for count in found.group(1, 2, 4)):
        raise ConfigError(
            f"--machine {text!r} is not a number of GPUs, their name and a network's rate.",
            fix="Write for example '8x H100', or '8x8 H100, 400 Gb/s': what each GPU can send to "
            "others.",
        )
    count, each, wanted, network = found.groups()
    word, wanted = _word(wanted), wanted.strip()
    named = [(row, (row.name, *row.gpu_names, *row.short_names)) for row in machine_rows()]
    rows = [row for row, names in named if word in map(_word, names)] or [
        row for row, names in named if word and any(_word(name).startswith(word) for name in names)
    ]
    if len(rows) != 1:
        guess = nearest(wanted, [name for _, names in named for name in names])
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise ConfigError(
            f"--machine {wanted!r} matches several machines."
            if rows
            else f"There is no machine named {wanted!r}.",
            fix=f"Write one of {', '.join(row.name for row in rows)}."
            if rows
            else f"{hint}`flatout list machines` shows the known ones.",
        )
    (row,) = rows
    gpu = Gpu(
        row.gpu_names[0], row.memory_gb.value * 1e9 / GIB, row.compute_capability or (0, 0), ""
    )
    return Machine(
        "unknown",
        0,
        0.0,
        (gpu,) * (int(count or 1) * int(each or 1)),
        platform.python_version(),
        is_here=False,
        gpus_per_node=int(each or count or 1),
        network_gbit_per_s=float(network) if network else None,
    )


def _word(name: str) -> str:
    """Return a name without case, punctuation and the words that everyone omits."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def probe() -> Machine:
    """Return what this process may use, within its affinity and the limits of its container."""
    cgroup_cores, cgroup_bytes = cgroup_limits()
    return Machine(
        _cpu_name(),
        min(usable_cores(), cgroup_cores or 2**31),
        min(psutil.virtual_memory().total, cgroup_bytes or 2**63) / GIB,
        _gpus(),
        platform.python_version(),
        _multiplies_bf16(),
    )


def _multiplies_bf16() -> bool:
    """Return whether Linux reports such instructions for an x86 CPU.

    Arm has them too, but their gain there is not measured.
    """
    return bool({"avx512_bf16", "amx_bf16"} & set(_read(Path("/proc/cpuinfo")).split()))


def cgroup_limits() -> tuple[int | None, int | None]:
    """Return the (cores, bytes) that a container allows by cgroups v1 or v2. None: no limit."""
    cores = [limit for limit, _ in _cpu_limits()]
    files = [folder / "memory.max" for folder in _cgroups()]
    files += [folder / "memory.limit_in_bytes" for folder in _cgroups("memory")]
    sizes = [int(size) for size in map(_read, files) if size.strip().isdigit()]
    sizes = [size for size in sizes if size < 2**60]  # v1 writes "no limit" as about 2^63
    return max(1, int(min(cores))) if cores else None, min(sizes, default=None)


def limited_cpu_s() -> float | None:
    """Return the CPU seconds of all processes that share a container's limit of cores so far.

    None without a limit below the cores that this process may use anyway.
    """
    cores = usable_cores()
    return next((used_s for limit, used_s in _cpu_limits() if limit < cores), None)


def _cpu_limits() -> Iterator[tuple[float, float | None]]:
    """Yield each limit of cores that applies, and the CPU seconds used under it so far.

    A quota of "max" or -1 is no limit.
    """
    found = [(_read(f / "cpu.max"), _read(f / "cpu.stat"), 1e6) for f in _cgroups()]
    for folder in _cgroups("cpu"):
        quota = " ".join(_read(folder / f"cpu.cfs_{one}_us") for one in ("quota", "period"))
        found.append((quota, f"usage_usec {_read(folder / 'cpuacct.usage')}", 1e9))
    for quota, stat, per_s in found:
        limit, used = re.match(r"(\d+)\s+(\d+)", quota), re.search(r"usage_usec (\d+)", stat)
        if limit:
            yield int(limit[1]) / int(limit[2]), int(used[1]) / per_s if used else None


def _cgroups(controller: str = "") -> list[Path]:
    """Return this process's cgroup of a controller of v1, by default of v2, and its parents, since
    limits apply at all levels. In a container, its own level may be mounted as the root.
    """
    root, path = CGROUPS / controller, "/"
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, named = line.split(":", 2)
        if controller in controllers.split(","):
            path = named
    leaf = root / path.lstrip("/")
    return [folder for folder in (leaf, *leaf.parents) if folder == root or root in folder.parents]


SAME_MEMORY = 0.12
"""Largest relative difference of the memory that a driver reports in GiB from a data sheet's GB."""
BUSY_CORES = 0.4
"""Cores that other processes must use to count as a load on this one."""
BUSY_S = 0.3
"""How long the load of other processes is measured."""


class CpuTimes(NamedTuple):
    """CPU seconds on the cores that this process may use, at one moment."""

    at_s: float
    used_s: float
    """Of all processes. In a container with a limit of cores, only of those in it."""
    own_s: float
    """Of this process and its children."""
    children_s: float = 0.0
    """Of the children that are still running."""

    @classmethod
    def read(cls, children: Iterable[psutil.Process] = ()) -> CpuTimes:
        """Return the times now. `children` are those that are still running."""
        own_s, children_s = sum(os.times()[:4]), 0.0  # with children that have ended
        for child in children:
            with suppress(psutil.Error):
                children_s += sum(child.cpu_times()[:4])
        used_s = limited_cpu_s()
        if used_s is None:
            each = psutil.cpu_times(percpu=True)
            here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(each))
            mine = [times for core, times in enumerate(each) if core in here]
            idle_s = sum(times.idle + getattr(times, "iowait", 0.0) for times in mine)
            used_s = sum(sum(times[:8]) for times in mine) - idle_s  # from the ninth on: guests
        return cls(time.monotonic(), used_s, own_s + children_s, children_s)

    def others_until(self, later: CpuTimes) -> float:
        """Return the cores that other processes kept busy between two moments."""
        others_s = later.used_s - self.used_s - (later.own_s - self.own_s)
        return max(others_s, 0.0) / max(later.at_s - self.at_s, 1e-3)


def other_busy_cores() -> float:
    """Return the cores that other processes keep busy, measured for BUSY_S."""

    def times() -> CpuTimes:
        return CpuTimes.read(psutil.Process().children(recursive=True))

    before = times()
    time.sleep(BUSY_S)
    return before.others_until(times())


def pick_device(wanted: str, machine: Machine) -> tuple[str, str]:
    """Return (device, reason) for `auto`, `cpu`, `cuda`, `cuda:N` or `mps`. `auto` is never `mps`.

    Raises: HardwareError for a different name, or when a GPU is requested and cannot be used.
    """
    if wanted == "cpu":
        return "cpu", "requested"
    check_device_name(wanted)
    import torch

    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise HardwareError(
                "train.device=mps cannot be used: it is the GPU of a Mac with macOS 14 or newer, "
                "and torch finds none.",
                fix="Remove train.device.",
            )
        return "mps", "requested: the GPU of a Mac, on which flatout has never been run"
    obstacle = _cuda_obstacle(machine)
    if obstacle is not None:
        if wanted == "auto":
            return "cpu", obstacle
        raise HardwareError(
            f"train.device={wanted} cannot be used: {obstacle}.",
            fix="Make the GPU usable, or remove train.device: train.device=auto would run on the "
            f"CPU ({machine.cpu_name}, {counted(machine.cores, 'core')}).",
        )
    count = torch.cuda.device_count()
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        raise HardwareError(
            f"There is no {wanted}: torch sees {counted(count, 'GPU')}.",
            fix=f"Use cuda:0 to cuda:{count - 1}.",
        )
    name = torch.cuda.get_device_name(index)
    return ("cuda", f"torch can use {name}") if wanted == "auto" else (wanted, f"requested: {name}")


def as_torch_sees(machine: Machine, device: str) -> Machine:
    """Return a machine with the GPUs that torch uses here, in its order, if `device` is one.

    CUDA_VISIBLE_DEVICES hides and orders GPUs, and the driver lists all of them in its own order.
    """
    import torch

    count = torch.cuda.device_count() if device.startswith("cuda") else 0
    seen = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]
    known = {gpu.uuid: gpu for gpu in machine.gpus}
    gpus = tuple(known[uuid] for uuid in seen if uuid in known)
    return replace(machine, gpus=gpus) if len(gpus) == count > 0 else machine


def check_device_name(wanted: str) -> None:
    """Check that `wanted` is auto, cpu, cuda, cuda:N or mps.

    Raises: HardwareError with the nearest name.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", wanted):
        is_gpu = wanted.lower().startswith("gpu")
        guess = "cuda" if is_gpu else nearest(wanted, ["auto", "cpu", "cuda"])
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise HardwareError(
            f"train.device={wanted!r} is not a device.",
            fix=f"{hint}Known: auto, cpu, cuda, cuda:N, mps.",
        )


def fingerprint(device: str = "cpu") -> dict[str, str | int]:
    """Return what bit-exact results depend on: otherwise the last bits may differ."""
    import torch

    found: dict[str, str | int] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_name": _cpu_name(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }
    if device.startswith("cuda"):
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found |= {"cuda": str(torch.version.cuda), "cudnn": int(version or 0)}
    return found


def _cuda_obstacle(machine: Machine) -> str | None:
    """Return why torch cannot use a GPU, such as the text of its warning. None when it can."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if not machine.gpus:
        return "no NVIDIA driver, or no GPU behind it"
    if torch.version.cuda is None:
        build = f"this torch ({torch.__version__}) is a CPU build"
        return f"{build}: install one for CUDA with `{CUDA_TORCH}`"
    if caught:
        return str(caught[0].message).split("\n", 1)[0].rstrip(". ")
    number = len(machine.gpus)
    return f"torch sees none of this machine's {number} GPUs: CUDA_VISIBLE_DEVICES may hide them"


def _gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that the driver reports. Without a driver or pynvml there are none."""
    try:
        import pynvml
    except ImportError:
        return ()
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return tuple(
                Gpu(
                    pynvml.nvmlDeviceGetName(handle),
                    pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB,
                    tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    pynvml.nvmlSystemGetDriverVersion(),
                    pynvml.nvmlDeviceGetUUID(handle),
                )
                for handle in handles
            )
        finally:
            pynvml.nvmlShutdown()
    return ()


def _cpu_name() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
