"""The memory, the speed and the checkpoints of LoRA against training all weights, on a CPU.

    python benchmarks/lora.py

Each case builds a run of one model, takes three steps while torch's profiler records the CPU
allocator (weights, optimizer state and scratch space count), and saves a checkpoint. Then all cases
take steps in turns. Their time is that of the processor, with one thread, so that other processes
hardly matter. Weights are random: they do not affect any of these results.
Writes benchmarks/results/lora.json and .md. It takes about a minute on two cores.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measurement import facts, markdown, parser, publish, ratios, spread
from plan import EAGER, MIB, STEPS, recorded, shape
from training_runs import code_state

from flatout import Dataset, load_config
from flatout.assembly.run import Run
from flatout.cli.commands.prepare import prepare
from flatout.storage.files import folder_bytes
from flatout.training.checkpoint.savers import save as save_run
from flatout.training.step import train_step

ROUNDS = 11
"""Timed steps of each case."""
MODEL = shape(6, 384, 6, 128, "model.norm=rmsnorm", "model.activation=swiglu")
ROWS = 4
TEXT = "synthetic:documents=200,words=300,seed=0"
EVERY = "lora.rank=8"
RECOMPUTED = f"speedups={EAGER.partition('=')[2]},+checkpointing"
CASES: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "LoRA, rank 8, all-linear": (EVERY,),
    "LoRA, rank 8, q and v": (EVERY, "lora.targets=[q, v]"),
    "all weights, checkpointing": (RECOMPUTED,),
    "LoRA, rank 8, all-linear, checkpointing": (EVERY, RECOMPUTED),
}
"""What each way to train the model changes."""


def main() -> None:
    given = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prepare([TEXT], out=Path(folder) / "data", tokenizer="byte")
        found = measure(Path(folder) / "data", Path(folder), CASES, ROUNDS)
    publish(given.out, "lora", found, table(found))


def measure(
    data: Path, folder: Path, cases: dict[str, tuple[str, ...]], rounds: int
) -> dict[str, Any]:
    """Return the results of every case."""
    rows, runs = [], []
    for number, (name, overrides) in enumerate(cases.items()):
        words = [*MODEL, EAGER, f"data.path={data}", "train.device=cpu", "train.steps=2000"]
        words += [f"batch.rows_per_device={ROWS}", "batch.accumulate=1", *overrides]
        run, predicted, peak = recorded(load_config(None, words), Dataset.open(data))
        run.folder = folder / str(number)
        row = {
            "name": name,
            "overrides": overrides,
            "parameters": sum(parameter.numel() for parameter in run.core.parameters()),
            "trained": sum(parameter.numel() for parameter in run.trained()),
            "predicted_mib": predicted.total / MIB,
            "allocated_mib": peak / MIB,
            "checkpoint_mib": folder_bytes(save_run(run)) / MIB,
            "step_ms": [],
        }
        rows.append(row)
        runs.append(run)
    for _ in range(rounds):
        for run, row in zip(runs, rows, strict=True):
            row["step_ms"].append(1e3 * timed_step(run))
    for run in runs:
        run.loader.close()
    found = {"tokens": ROWS * runs[0].config.data.seq_len, "rows": rows}
    return {**facts(), "commit": code_state(), "torch": torch.__version__, **found}


def timed_step(run: Run) -> float:
    """Take a step, and return its seconds of CPU time."""
    batch, began = next(run.loader), time.process_time()
    train_step(run, batch)
    run.step += 1
    return time.process_time() - began


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    whole = found["rows"][0]
    return markdown(
        "| trained parameters | allocated, MiB | predicted, MiB | relative memory "
        "| CPU ms per step | relative time | checkpoint, MiB",
        [
            (
                row["name"],
                f"{row['trained']:,}",
                f"{row['allocated_mib']:,.0f}",
                f"{row['predicted_mib']:,.0f}",
                f"{row['allocated_mib'] / whole['allocated_mib']:.0%}",
                spread(row["step_ms"]),
                f"{statistics.median(ratios(row['step_ms'], whole['step_ms'])):.0%}",
                f"{row['checkpoint_mib']:,.1f}",
            )
            for row in found["rows"]
        ],
        f"A Llama-shaped model of {whole['parameters']:,} parameters, steps of "
        f"{found['tokens']} tokens, eager. Allocated is the peak of torch's allocator over {STEPS} "
        f"steps, weights included; CPU times with one thread, of {len(whole['step_ms'])} steps "
        "each, in turns: median (smallest to largest), and the median ratio within a turn; a "
        f"checkpoint contains the optimizer state. {found['machine']}, torch {found['torch']}; "
        f"commit {found['commit']}; `python benchmarks/lora.py`.",
    )


if __name__ == "__main__":
    main()
