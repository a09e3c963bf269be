"""The memory, the speed and the checkpoints of LoRA against training all weights, on a CPU.

    python benchmarks/lora.py

Each case builds a run of one model, takes three steps while torch's profiler records the CPU
allocator (weights, optimizer state and scratch space count), and saves a checkpoint. Then all cases
take steps in turns; their time is that of the processor, with one thread, so that other programs
hardly matter. Weights are random: they do not affect any of these figures.
Writes benchmarks/results/lora.json and .md. It takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from main_job import RESULTS
from plan import EAGER, MIB, peak_bytes, shape
from torch.profiler import ProfilerActivity, profile
from training_runs import built, code_state

from flatout import Dataset, load_config
from flatout.assembly.memory import estimate
from flatout.assembly.resolve import workload_of
from flatout.assembly.run import Run
from flatout.commands.prepare import prepare
from flatout.files import folder_bytes
from flatout.hardware import probe
from flatout.training.checkpoint.savers import save
from flatout.training.step import train_step

STEPS = 3
"""Steps whose memory is recorded; the optimizer state exists from the second on."""
ROUNDS = 11
"""Timed steps of each case."""
MODEL = shape(6, 384, 6, 128, "model.norm=rmsnorm", "model.activation=swiglu")
ROWS = 4
TEXT = "synthetic:documents=200,words=300,seed=0"
EVERY = "lora.rank=8"
RECOMPUTED = f"speedups={EAGER.partition('=')[2]},+checkpointing"


@dataclass(frozen=True)
class Case:
    """One way to train the model."""

    name: str
    overrides: tuple[str, ...] = ()


CASES = (
    Case("all weights"),
    Case("LoRA, rank 8, all-linear", (EVERY,)),
    Case("LoRA, rank 8, q and v", (EVERY, "lora.targets=[q, v]")),
    Case("all weights, checkpointing", (RECOMPUTED,)),
    Case("LoRA, rank 8, all-linear, checkpointing", (EVERY, RECOMPUTED)),
)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prepare([TEXT], out=Path(folder) / "data", tokenizer="byte")
        found = measure(Path(folder) / "data", Path(folder), CASES, ROUNDS)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "lora.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "lora.md").write_text(table(found))
    print(table(found))


def measure(data: Path, folder: Path, cases: tuple[Case, ...], rounds: int) -> dict:
    """Return the figures of every case."""
    rows, runs = [], []
    for number, case in enumerate(cases):
        run, row = recorded(case, data)
        run.folder = folder / str(number)
        row["checkpoint_mib"] = folder_bytes(save(run)) / MIB
        rows.append({"name": case.name, "overrides": case.overrides, **row, "step_ms": []})
        runs.append(run)
    for _ in range(rounds):
        for run, row in zip(runs, rows, strict=True):
            row["step_ms"].append(1e3 * timed_step(run))
    for run in runs:
        run.feed.close()
    return {
        "machine": probe().describe(),
        "commit": code_state(),
        "torch": torch.__version__,
        "tokens": ROWS * runs[0].config.data.seq_len,
        "rows": rows,
    }


def recorded(case: Case, data: Path) -> tuple[Run, dict]:
    """Return a run after its first steps, and its memory."""
    words = [
        *MODEL,
        EAGER,
        f"data.path={data}",
        "train.device=cpu",
        f"batch.rows_per_device={ROWS}",
        "batch.accumulate=1",
        "train.steps=2000",
        *case.overrides,
    ]
    config = load_config(None, words)
    gc.collect()  # what an earlier run frees would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run = built(config, Dataset.open(data))
        for _ in range(STEPS):
            timed_step(run)
    found = estimate(workload_of(run.config), run.rows_per_device)
    return run, {
        "parameters": sum(parameter.numel() for parameter in run.core.parameters()),
        "trained": sum(parameter.numel() for parameter in run.trained()),
        "predicted_mib": found.total / MIB,
        "allocated_mib": peak_bytes(record) / MIB,
    }


def timed_step(run: Run) -> float:
    """Take a step, and return its seconds of CPU time."""
    batch, began = next(run.feed), time.process_time()
    train_step(run, batch)
    run.step += 1
    return time.process_time() - began


def table(found: dict) -> str:
    """Return the figures as Markdown."""
    whole = found["rows"][0]
    lines = [
        "| | trained parameters | allocated, MiB | predicted, MiB | of all weights' "
        "| CPU ms per step | of all weights' | checkpoint, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        times = row["step_ms"]
        share = statistics.median(
            mine / theirs for mine, theirs in zip(times, whole["step_ms"], strict=True)
        )
        lines.append(
            f"| {row['name']} | {row['trained']:,} | {row['allocated_mib']:,.0f} "
            f"| {row['predicted_mib']:,.0f} | {row['allocated_mib'] / whole['allocated_mib']:.0%} "
            f"| {statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f}) "
            f"| {share:.0%} | {row['checkpoint_mib']:,.1f} |"
        )
    return "\n".join([*lines, "", how(found)]) + "\n"


def how(found: dict) -> str:
    """Return how the figures were measured."""
    rounds = len(found["rows"][0]["step_ms"])
    return (
        f"A Llama-shaped model of {found['rows'][0]['parameters']:,} parameters, steps of "
        f"{found['tokens']} tokens, eager. Allocated is the peak of torch's allocator over {STEPS} "
        f"steps, weights included; CPU times with one thread, of {rounds} steps each, in turns: "
        "median (smallest to largest), and the median ratio within a turn; a checkpoint contains "
        f"the optimizer state. {found['machine']}, torch {found['torch']}; commit "
        f"{found['commit']}; `python benchmarks/lora.py`."
    )


if __name__ == "__main__":
    main()
