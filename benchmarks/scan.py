"""The cost of an eigenstate network's recurrence, forward and backward, by variant of ops/scan.py.

    python benchmarks/scan.py --out benchmarks/results

Draws 128 eigenstates with time constants up to the sequence length and an fp32 drive, and times the
states and all gradients. On a GPU a variant is captured into a CUDA graph and replayed, so that the
host does not count; `chunked` is also compiled, as in training. The reference, one step per token,
is called directly, for up to 4,096 tokens and at most 5 times. Times are medians over the repeats,
with minimum and maximum. Bytes are the minimum any variant has to move: the drive in, the states
out; their gradient and the states in, the drive's gradient out. The resulting rate is compared with
that of copying a large tensor on the same machine; data that fits a GPU's cache can be faster.
--out DIR writes scan-DEVICE.json and .md after each measurement; without it the table is only
printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from main_job import commit, spread
from scan_fft import fft

from flatout.files import write_text
from flatout.hardware import probe
from flatout.ops import scan

EIGENSTATES = 128
TOKENS = (1_024, 4_096, 32_768)
ROWS = (1, 4)
REFERENCE_TOKENS = 4_096
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="directory for the figures")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        print(
            "warning: these are times of a CPU, where Triton does not run; they say nothing about"
            " a GPU",
            file=sys.stderr,
        )
    found = measure(arguments.device, arguments.repeats, out=arguments.out)
    print(table(found))


def write(found: dict, out: Path) -> None:
    """Write the current figures."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"scan-{found['device'].lower().replace(' ', '-')}"
    write_text(out / f"{name}.json", json.dumps(found, indent=1) + "\n")
    write_text(out / f"{name}.md", table(found))


def device_name(device: str) -> str:
    """Return the driver's name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def measure(
    device: str,
    repeats: int,
    tokens: tuple[int, ...] = TOKENS,
    rows: tuple[int, ...] = ROWS,
    eigenstates: int = EIGENSTATES,
    out: Path | None = None,
) -> dict:
    """Return every time of every variant at each size; with `out`, write after each measurement."""
    found: dict = {
        "device": device_name(device),
        "machine": probe().describe(),
        "torch": torch.__version__,
        "commit": commit(),
        "repeats": repeats,
        "eigenstates": eigenstates,
        "bytes_per_s": copied_bytes_per_s(device, repeats),
        "rows": [],
    }
    for length, count, (way, function) in itertools.product(tokens, rows, ways(device).items()):
        if way == "reference" and length > REFERENCE_TOKENS:
            continue
        seconds = timed(device, function, drawn(device, count, length, eigenstates), repeats, way)
        size = {"rows": count, "tokens": length, "bytes": least_bytes(count, length, eigenstates)}
        found["rows"].append({"way": way, **size, "seconds": seconds})
        if out is not None:
            write(found, out)
    return found


def ways(device: str) -> dict[str, Callable[..., Any]]:
    """Return the variants that run here, by name; Triton's needs a GPU."""
    own = {"reference": scan.reference, "chunked": scan.chunked, "triton": scan.triton}
    every = {**own, "fft": fft}
    if device == "cpu":
        return {way: function for way, function in every.items() if not way.startswith("triton")}
    return every | {"chunked, compiled": torch.compile(scan.chunked, dynamic=False)}


def least_bytes(rows: int, tokens: int, eigenstates: int) -> int:
    """Return the bytes that any variant must move: five times all states, in fp32."""
    return 5 * rows * tokens * 2 * eigenstates * 4


def drawn(device: str, rows: int, tokens: int, eigenstates: int) -> list[Any]:
    """Return logarithms, angles and drive, all requiring gradients, and the states' gradient."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.exp(torch.rand(eigenstates, generator=generator) * math.log(tokens))
    angle = torch.rand(eigenstates, generator=generator) * 2 * math.pi
    drive, weights = (
        torch.randn(rows, tokens, 2 * eigenstates, generator=generator) for _ in range(2)
    )
    return [
        *(leaf.to(device).requires_grad_() for leaf in (-1 / memory, angle, drive)),
        weights.to(device),
    ]


def timed(
    device: str, function: Callable[..., Any], given: list[Any], repeats: int, way: str
) -> list[float]:
    """Return the seconds of each repeat after three warm-up calls."""
    *leaves, weights = given

    def call() -> None:
        torch.autograd.grad(function(*leaves), leaves, weights)

    print(f"{way}: {tuple(weights.shape)}", file=sys.stderr)
    if device == "cpu" or way == "reference":
        call()
        return [clocked(device, call) for _ in range(min(repeats, 5))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    return [clocked(device, graph.replay) for _ in range(repeats)]


def clocked(device: str, call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    if device == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def copied_bytes_per_s(device: str, repeats: int) -> list[float]:
    """Return the rate of copying a large tensor in each repeat; each byte is read and written."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return [
        2 * source.numel() / clocked(device, lambda: target.copy_(source)) for _ in range(repeats)
    ]


def table(found: dict) -> str:
    """Return the figures as Markdown."""
    rate = statistics.median(found["bytes_per_s"])
    lines = [
        (
            f"| {found['eigenstates']} eigenstates, forward and backward | rows x tokens | ms | M"
            " tokens/s | share of the memory's bandwidth |"
        ),
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        seconds = statistics.median(row["seconds"])
        share = row["bytes"] / seconds / rate
        lines.append(
            f"| {row['way']} | {row['rows']} x {row['tokens']:,} |"
            f" {spread([1e3 * value for value in row['seconds']], 3)} |"
            f" {row['rows'] * row['tokens'] / seconds / 1e6:,.2f} | {100 * share:.1f}% |"
        )
    where = "**a CPU: this says nothing about a GPU**; " if found["device"] == "cpu" else ""
    lines += [
        "",
        (
            f"{where}{found['machine']}, torch {found['torch']}; copying moves"
            f" {spread([value / 1e9 for value in found['bytes_per_s']])} GB/s; medians of"
            f" {found['repeats']} repeats (smallest to largest); commit {found['commit']}; `python"
            " benchmarks/scan.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
