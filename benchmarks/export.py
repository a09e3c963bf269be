"""Time and memory of an export, by format and size of the model.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/export.py --repeats 3

Saves Llama-shaped runs of two sizes with random weights in a temporary directory, and exports each
in a process of its own, alternating the formats. The time is that of `flatout export` without
starting the program: checking the checkpoint's digests, reading, converting and writing every
weight, and syncing the files. The memory is the peak of the process's resident memory during the
export, less the peak before it. The last row copies the checkpoint's weights with `cp` and syncs
them, for comparison. Writes benchmarks/results/export.json and .md.
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
from pathlib import Path

import torch
from loader import make_data
from main_job import RESULTS, commit, spread

from flatout.assembly.resolve import resolve
from flatout.assembly.run import build
from flatout.config.schema import load_config
from flatout.data.store.manifest import TOKENIZER
from flatout.data.store.mix import open_data
from flatout.hardware import probe
from flatout.inference.export.export import export_run
from flatout.inference.export.source import open_source
from flatout.parallel.mesh import make_mesh
from flatout.training.checkpoint.savers import save
from flatout.training.run_dir.layout import write_config

SHAPE = {"d_model": 1024, "num_heads": 8, "norm": "rmsnorm", "activation": "swiglu"}
LAYERS = (5, 20)
"""A quarter of a gigabyte of weights, and a whole one."""
WAYS = {
    "safetensors": ("safetensors", None),
    "huggingface": ("huggingface", None),
    "huggingface, bfloat16": ("huggingface", "bfloat16"),
    "gguf, bfloat16": ("gguf", "bfloat16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--worker", nargs=3, metavar=("RUN", "WAY", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(export(*arguments.worker)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.layers, arguments.repeats)
    found |= {"machine": probe().describe(), "commit": commit(), "repeats": arguments.repeats}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "export.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "export.md").write_text(table(found))
    print(table(found))


def measure(folder: Path, layers: list[int], repeats: int) -> dict:
    """Return every figure of every repeat, by number of layers."""
    data = make_data(folder / "data", 1 << 16, shards=1)
    sizes = {}
    for count in layers:
        run = make_run(folder / f"run-{count}", data, count)
        rows: dict[str, list[dict]] = {way: [] for way in [*WAYS, "cp"]}
        for repeat in range(-1, repeats):  # the first turn fills the page cache and is dropped
            for way, kept in rows.items():
                row = copied(run, folder / "copy") if way == "cp" else worker(run, way, folder)
                if repeat >= 0:
                    kept.append(row)
                print(f"{count} layers, {way}: {row}", file=sys.stderr)
        sizes[str(count)] = {"gigabytes": weights(run).stat().st_size / 1e9, "rows": rows}
        shutil.rmtree(run)
    return {"sizes": sizes}


def make_run(folder: Path, data: Path, layers: int) -> Path:
    """Save a run with random weights, without training it, and return its directory."""
    keys = {f"model.{key}": value for key, value in {**SHAPE, "num_layers": layers}.items()}
    config = load_config().with_values(
        {
            **keys,
            "data.path": str(data),
            "data.seq_len": 256,
            "batch.tokens_per_step": 256,
            "batch.rows_per_device": 1,
            "train.steps": 1,
            "train.device": "cpu",
            "speedups": "none",
        }
    )
    dataset = open_data(config.data)
    resolved, decisions = resolve(config, machine=probe(), dataset=dataset, world_size=1)
    run = build(
        resolved,
        machine=probe(),
        mesh=make_mesh(resolved.parallel, "cpu"),
        dataset=dataset,
        folder=folder,
        decisions=decisions,
    )
    write_config(folder, run.config)
    shutil.copy(data / TOKENIZER, folder)
    save(run)
    run.feed.close()
    return folder


def weights(run: Path) -> Path:
    """Return the file with the weights of a run's only checkpoint."""
    (found,) = (run / "checkpoints").glob("step-*/model-*.safetensors")
    return found


def worker(run: Path, way: str, folder: Path) -> dict:
    """Export in a process of its own, and return its figures."""
    out = folder / "out"
    words = [sys.executable, __file__, "--worker", str(run), way, str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    return json.loads(done.stdout.splitlines()[-1])


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


def table(found: dict) -> str:
    """Return the figures as Markdown."""
    sizes = list(found["sizes"].values())
    heads = [f"{size['gigabytes']:.2f} GB of weights" for size in sizes]
    lines = [
        f"| format | {' | '.join(f'{head}: s | MiB' for head in heads)} |",
        f"|---|{'---|---|' * len(sizes)}",
    ]
    for way in WAYS:
        cells = []
        for size in sizes:
            rows = size["rows"][way]
            cells.append(spread([row["seconds"] for row in rows], 2))
            cells.append(f"{statistics.median(row['peak_mib'] for row in rows):,.0f}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    copies = [spread([row["seconds"] for row in size["rows"]["cp"]], 2) for size in sizes]
    lines.append(f"| `cp` and sync | {' | | '.join(copies)} | |")
    return "\n".join(
        [
            *lines,
            "",
            f"{found['machine']}, one thread; Llama-shaped, fp32 in the checkpoint; s: seconds of "
            "the export, with checking the digests of the checkpoint; MiB: peak of resident memory "
            f"above that before the export; {found['repeats']} repeats in fresh processes, "
            f"alternating; median (smallest to largest); commit {found['commit']}; "
            "`python benchmarks/export.py`.\n",
        ]
    )


if __name__ == "__main__":
    main()
