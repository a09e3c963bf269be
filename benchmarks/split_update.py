"""The cost of updating weights stored in two parts (bf16-weights), against torch's operations.

    python benchmarks/split_update.py --out benchmarks/results

Takes the matrices of GPT-2 at 124M and at 700M with random gradients, and times AdamW's whole step:
on split weights with the kernel of flatout/ops/split_update.py, on split weights with torch's
operations (as before the kernel existed), and torch's fused AdamW on fp32 weights. Muon's decay and
addition of its bf16 steps to the hidden matrices are timed the same way. Times are medians over the
repeats, with minimum and maximum. GB/s is 28 bytes per weight over the time for AdamW, 10 for Muon,
whatever is actually moved, so extra traffic shows as a lower rate. `equal` is the share of weights
that match torch's operations bit for bit after one step. --tiny takes a few weights, as a smoke
test; on a CPU, where Triton does not run, both variants of split weights are torch's. --out DIR
writes split-update-DEVICE.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from scan import clocked, copied_bytes_per_s

from flatout.hardware import probe
from flatout.models.split_weights import SplitTensor, decay_and_add, whole
from flatout.ops import split_update, triton_kernels
from flatout.ops.split import split

SIZES = {"GPT-2 124M": (50_304, 12, 768), "GPT-2 700M": (50_304, 24, 1_536)}
TINY = {"tiny": (96, 2, 32)}
WARM_UP = 3
BYTES = {"AdamW": sum(split_update.ADAMW_BYTES.values()), "Muon": 2 * (2 + 2) + 2}
WAYS = ("split, kernel", "split, torch's operations", "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a few weights, as a smoke test")
    parser.add_argument("--out", type=Path, help="directory for the figures")
    arguments = parser.parse_args()
    found = measure(arguments.device, arguments.repeats, TINY if arguments.tiny else SIZES)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"split-update-{found['device'].lower().replace(' ', '-')}"
        (arguments.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.out / f"{name}.md").write_text(table(found))
    print(table(found))


def measure(device: str, repeats: int, sizes: dict[str, tuple[int, int, int]]) -> dict:
    """Return the times of every variant at each size."""
    rows = [
        row
        for model, size in sizes.items()
        for update in (adamw_rows, muon_rows)
        for row in update(device, repeats, model, *size)
    ]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": probe().describe(),
        "torch": torch.__version__,
        "repeats": repeats,
        "copied_bytes_per_s": copied_bytes_per_s(device, repeats),
        "rows": rows,
    }


def hidden(layers: int, width: int) -> list[tuple[int, int]]:
    """Return the shapes of a block's matrices: fused QKV, output, up, down."""
    return layers * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def drawn(
    device: str, shapes: list[tuple[int, int]], size: float, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return random tensors."""
    generator = torch.Generator(device).manual_seed(len(shapes))
    return [
        (torch.randn(shape, generator=generator, device=device) * size).to(dtype)
        for shape in shapes
    ]


def adamw_rows(
    device: str, repeats: int, model: str, vocabulary: int, layers: int, width: int
) -> list[dict]:
    """Return the times of AdamW's whole step by variant."""
    shapes = [(vocabulary, width), *hidden(layers, width)]

    def made(way: str) -> tuple[list[torch.Tensor], Callable[[], None]]:
        weights = drawn(device, shapes, 0.02)
        held = [
            torch.nn.Parameter(weight if way == "fp32" else SplitTensor(*split(weight)))
            for weight in weights
        ]
        del weights
        groups = [
            {"params": held[:1], "weight_decay": 0.0},
            {"params": held[1:], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
        for parameter, gradient in zip(held, drawn(device, shapes, 1e-3), strict=True):
            parameter.grad = gradient
        return held, optimizer.step

    return compared(device, repeats, model, "AdamW", made)


def muon_rows(
    device: str, repeats: int, model: str, _vocabulary: int, layers: int, width: int
) -> list[dict]:
    """Return the times of adding Muon's steps by variant; fp32 weights take fp32 steps."""
    shapes = hidden(layers, width)

    def made(way: str) -> tuple[list[torch.Tensor], Callable[[], None]]:
        weights: list[torch.Tensor] = drawn(device, shapes, 0.02)
        steps = drawn(device, shapes, 1.0, torch.float32 if way == "fp32" else torch.bfloat16)
        held = weights if way == "fp32" else [SplitTensor(*split(weight)) for weight in weights]
        return held, lambda: decay_and_add(held, steps, kept=0.9999, alpha=-1e-4)

    return compared(device, repeats, model, "Muon", made)


def compared(
    device: str,
    repeats: int,
    model: str,
    update: str,
    made: Callable[[str], tuple[list[torch.Tensor], Callable[[], None]]],
) -> list[dict]:
    """Return a row per variant; each frees its memory before the next."""
    rows, after_one = [], {}
    for way in WAYS:
        print(f"{model}, {update}: {way}", file=sys.stderr)
        with patch.object(
            triton_kernels,
            "run_on",
            lambda tensor, way=way: tensor.is_cuda and way == "split, kernel",
        ):
            held, step = made(way)
            step()
            after_one[way] = torch.cat(
                [whole(tensor.detach()).flatten() for tensor in held[:3]]
            ).cpu()
            for _ in range(WARM_UP):
                step()
            times = [clocked(device, step) for _ in range(repeats)]
        rows.append(
            {
                "model": model,
                "update": update,
                "way": way,
                "weights": sum(tensor.numel() for tensor in held),
                "seconds": times,
            }
        )
        del held, step
        if device == "cuda":
            torch.cuda.empty_cache()
    rows[0]["equal"] = float(
        (after_one["split, kernel"] == after_one["split, torch's operations"]).double().mean()
    )
    return rows


def table(found: dict) -> str:
    """Return the figures as Markdown."""
    rate = statistics.median(found["copied_bytes_per_s"])
    lines = [
        "| model | update | variant | ms | GB/s | share of the copying rate | equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        seconds = statistics.median(row["seconds"])
        moved = BYTES[row["update"]] * row["weights"] / seconds
        equal = f"{100 * row['equal']:.4f}%" if "equal" in row else ""
        spread = f"{1e3 * min(row['seconds']):.3f} to {1e3 * max(row['seconds']):.3f}"
        lines.append(
            f"| {row['model']} | {row['update']} | {row['way']} | {1e3 * seconds:.3f} ({spread}) "
            f"| {moved / 1e9:,.0f} | {100 * moved / rate:.0f}% | {equal} |"
        )
    where = "**a CPU: this says nothing about a GPU**; " if found["device"] == "cpu" else ""
    lines += [
        "",
        (
            f"{where}{found['machine']}, torch {found['torch']}; copying moves {rate / 1e9:,.0f}"
            f" GB/s; medians of {found['repeats']} repeats (smallest to largest); GB/s count 28"
            " bytes per weight for AdamW, 10 for Muon; `python benchmarks/split_update.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
