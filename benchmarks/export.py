"""Time and memory of an export, by format and size of the model.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/export.py --repeats 3

Saves Llama-shaped runs of 5 and 20 layers (0.25 and 1 GB) with random weights in a temporary
directory, and exports each in a separate process, alternating the formats. The time is that of
`flatout export` without starting the program: checking the checkpoint's digests, reading,
converting and writing every weight, and syncing the files. The memory is the peak of the process's
resident memory during the export, less the peak before it. The last row copies the checkpoint's
weights with `cp` and syncs them, for comparison. It needs gguf. Writes
benchmarks/results/export.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loader import make_data
from measurement import facts, in_turns, json_of, markdown, parser, publish, spread
from training_runs import built

from flatout.config.schema import load_config
from flatout.data.store.manifest import TOKENIZER
from flatout.data.store.mix import open_data
from flatout.inference.export.export import export_run
from flatout.inference.export.source import open_source
from flatout.training.checkpoint.savers import save as save_run
from flatout.training.run_dir.layout import write_config

SHAPE = {"d_model": 1024, "num_heads": 8, "norm": "rmsnorm", "activation": "swiglu"}
WAYS = {
    "safetensors": ("safetensors", None),
    "huggingface": ("huggingface", None),
    "huggingface, bfloat16": ("huggingface", "bfloat16"),
    "gguf, bfloat16": ("gguf", "bfloat16"),
}


def main() -> None:
    made = parser(__doc__, repeats=3, layers=[5, 20])
    made.add_argument("--worker", nargs=3, metavar=("RUN", "WAY", "TO"), help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.worker:
        print(json.dumps(export(*given.worker)))
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = measure(Path(folder), given.layers, given.repeats)
    found = {"sizes": sizes, **facts(), "repeats": given.repeats}
    publish(given.out, "export", found, table(found))


def measure(folder: Path, layers: list[int], repeats: int) -> dict[str, Any]:
    """Return every result of every repeat, by number of layers."""
    data = make_data(folder / "data", 1 << 16, shards=1)
    sizes = {}
    for count in layers:
        run = make_run(folder / f"run-{count}", data, count)
        ways = {way: partial(worker, run, way, folder) for way in WAYS}
        ways["cp"] = partial(copied, run, folder / "copy")
        rows = in_turns(ways, repeats, warm_up=1)  # which fills the page cache
        sizes[str(count)] = {"gigabytes": weights(run).stat().st_size / 1e9, "rows": rows}
        shutil.rmtree(run)
    return sizes


def make_run(folder: Path, data: Path, layers: int) -> Path:
    """Save a run with random weights, without training it, and return its directory."""
    keys = {f"model.{key}": value for key, value in {**SHAPE, "num_layers": layers}.items()}
    keys |= {"data.path": str(data), "data.seq_len": 256, "train.steps": 1, "speedups": "none"}
    keys |= {"batch.tokens_per_step": 256, "batch.rows_per_device": 1, "train.device": "cpu"}
    config = load_config().with_values(keys)
    run = built(config, open_data(config.data), folder)
    write_config(folder, run.config)
    shutil.copy(data / TOKENIZER, folder)
    save_run(run)
    run.loader.close()
    return folder


def weights(run: Path) -> Path:
    """Return the file with the weights of a run's only checkpoint."""
    (found,) = (run / "checkpoints").glob("step-*/model-*.safetensors")
    return found


def worker(run: Path, way: str, folder: Path) -> dict[str, float]:
    """Export in a separate process, and return its results."""
    found = json_of([sys.executable, __file__, "--worker", run, way, folder / "out"])
    shutil.rmtree(folder / "out")
    return found


def export(run: str, way: str, out: str) -> dict:
    """Export once, and return seconds and memory."""
    to, dtype = WAYS[way]
    if to == "gguf":
        import gguf  # noqa: F401  # its memory is not that of the export
    torch.ones(8).sum()
    before = peak_bytes()
    began = time.perf_counter()
    export_run(open_source(run, dtype=dtype), Path(out), to, shard_mib=4096)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_mib": (peak_bytes() - before) / 2**20}


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had.

    On Linux, ru_maxrss includes that of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def copied(run: Path, out: Path) -> dict:
    """Copy the weights and sync the copy, and return the seconds."""
    began = time.perf_counter()
    subprocess.run(["cp", weights(run), out], check=True)
    with out.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    out.unlink()
    return {"seconds": seconds}


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    sizes = list(found["sizes"].values())
    rows = [[way] for way in WAYS]
    for size in sizes:
        for row in rows:
            exports = size["rows"][row[0]]
            row.append(spread((one["seconds"] for one in exports), 2))
            row.append(f"{statistics.median(one['peak_mib'] for one in exports):,.0f}")
    copies = [spread((one["seconds"] for one in size["rows"]["cp"]), 2) for size in sizes]
    rows.append(["`cp` and sync", *(cell for copy in copies for cell in (copy, ""))])
    heads = [f"{size['gigabytes']:.2f} GB of weights: s | MiB" for size in sizes]
    return markdown(
        f"format | {' | '.join(heads)}",
        rows,
        f"{found['machine']}, one thread; Llama-shaped, fp32 in the checkpoint; s: seconds of "
        "the export, with checking the digests of the checkpoint; MiB: peak of resident memory "
        f"above that before the export; {found['repeats']} repeats in fresh processes, "
        f"alternating; median (smallest to largest); commit {found['commit']}; "
        "`python benchmarks/export.py`.",
    )


if __name__ == "__main__":
    main()
