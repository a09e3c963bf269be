"""Peak rates of matmuls: the data sheet's, or the fastest measured here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flatout.hardware.machine import GIB, Machine, MachineRow, row_of

DTYPES = ("fp32", "tf32", "fp16", "bf16")
"""Arithmetic that a plain matmul can measure."""
COPY_BYTES = 256 << 20
"""Size of the copy that measures memory bandwidth: more than caches hold."""


MEASURED = "measured here"
"""How the source of a rate that is not from a data sheet begins."""


@dataclass(frozen=True)
class Peak:
    """The rate that counts as 100%, and its source."""

    tflops: float
    source: str


def peak_tflops(machine: Machine, device: str, dtype: str) -> Peak | None:
    """Return the peak rate from the data sheet of a known GPU, or else measured here.

    None, unknown, remains for fp8 on an unknown GPU, which no plain matmul can measure, and
    for a dtype that the data sheet of a machine elsewhere does not list. MPS is not measured.
    """
    row = _row_of_device(machine, device) if device.startswith("cuda") else None
    if row is not None and dtype in row.peak_tflops:
        figure = row.peak_tflops[dtype]
        return Peak(figure.value, f"data sheet: {figure.source}")
    if dtype not in DTYPES or not machine.is_here or device == "mps":
        return None
    tflops, size = measure(device, dtype)
    return Peak(tflops, f"{MEASURED}, matmul {size}³, {dtype}")


def copy_rate(device: str) -> float:
    """Return the measured 10^9 bytes per second of a copy within the device's memory.

    A large tensor is copied a few times, with all threads. Reads and writes count.
    """
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _fastest_s(lambda: target.copy_(source), device, repeats=6)
    return 2 * COPY_BYTES / seconds / 1e9


def measure(device: str, dtype: str) -> tuple[float, int]:
    """Return the TFLOP/s of the fastest of several square matmuls, and their size.

    It takes a fifth of a second. The matrices grow until one matmul takes a fair share of
    that time. Their values are random, since zeros draw less power.
    """
    on_cuda = device.startswith("cuda")
    size, largest, share_s = (1024, 8192, 0.02) if on_cuda else (512, 2048, 0.01)
    with torch.no_grad(), _matmul_precision(dtype, on_cuda):
        seconds = _matmul_s(device, dtype, size, repeats=2)
        while size < largest and seconds * 8 <= share_s:
            size *= 2
            seconds = _matmul_s(device, dtype, size, repeats=2)
        repeats = max(1, min(10, int(4 * share_s / seconds)))
        seconds = min(seconds, _matmul_s(device, dtype, size, repeats=repeats))
    return 2 * size**3 / seconds / 1e12, size


def _matmul_s(device: str, dtype: str, size: int, repeats: int) -> float:
    """Return the seconds of the fastest matmul, after one warm-up of each kind."""
    # The global generator belongs to the run.
    generator = torch.Generator(device).manual_seed(0)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).to(kind) for _ in range(2)
    )
    best_s = float("inf")
    for product in _products(device, dtype):
        product(left, right)
        best_s = min(best_s, _fastest_s(partial(product, left, right), device, repeats))
    return best_s


def _fastest_s(call: Callable[[], object], device: str, repeats: int) -> float:
    """Return the seconds of the fastest of several calls."""
    best_s = float("inf")
    for _ in range(repeats):
        _wait(device)
        start_s = time.perf_counter()
        call()
        _wait(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


def _products(device: str, dtype: str) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Return torch's ways to multiply two matrices.

    On a CPU, fp32 matmuls use MKL, and on request oneDNN, which can be twice as fast.
    """
    products: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if device == "cpu" and dtype == "fp32" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        onednn = torch.ops.mkldnn._linear_pointwise
        products.append(lambda left, right: onednn(left, right, None, "none", [], ""))
    return products


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@contextmanager
def _matmul_precision(dtype: str, on_cuda: bool) -> Iterator[None]:
    """Set the precision of fp32 matmuls on CUDA by `dtype`, whatever the run has set."""
    before = torch.get_float32_matmul_precision()
    if on_cuda:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        if on_cuda:
            torch.set_float32_matmul_precision(before)


def _row_of_device(machine: Machine, device: str) -> MachineRow | None:
    """Return the row of a device, by torch's name for it if possible.

    torch numbers GPUs by CUDA_VISIBLE_DEVICES, the driver by their slots.
    """
    if machine.is_here and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device)
        return row_of(found.name, found.total_memory / GIB)
    return machine.row
