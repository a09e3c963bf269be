"""A transformer and an eigenstate network of equal size and training tokens, by sequence length.

    OMP_NUM_THREADS=1 python benchmarks/models.py --part loss --text shakespeare.txt
    python benchmarks/models.py --part speed --text shakespeare.txt

Both models have 0.8 M parameters (4 layers, d 128; the number of eigenstates compensates for
attention's weights), and every step sees 4,096 characters, whatever the sequence length. The
learning rate of each model and optimizer is tuned at one length on a separate seed, over a grid of
factors of two that grows while the best rate is at its edge. That rate is used at every length with
other seeds. At the longest length half and twice the rate are tried too, to check that the choice
transfers. At the shortest, one run takes four times the steps.

`loss` compares validation losses and takes about 45 minutes on one core. The machine may be busy.
Each finished run is stored in WORK/models.jsonl. The same code does not repeat it. `speed` times
training steps of 16,384 tokens, alternating in fresh processes, with the peak memory above that
before the first step. The machine must be idle. Each part updates its section of
benchmarks/results/models.json, and models.md from both, after every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from main_job import text_parser
from measurement import RESULTS, facts, json_of, markdown, publish, ratios, spread
from training_runs import best_of_grid, built, code_state, loss_of, remembered, trained

from flatout import Dataset, load_config, prepare
from flatout.config.schema import RunConfig
from flatout.storage.json_io import read_json
from flatout.training.metrics.device import GIB, process_peak_bytes
from flatout.training.step import train_step

TITLES = {"muon": "Muon", "adamw": "AdamW"}
LENGTHS = (256, 1024, 4096)
STEPS, LONGER = 200, 800
SHARED = {"model.num_layers": 4, "model.d_model": 128, "train.device": "cpu"}
SHARED |= {"schedule.warmup": 0.05, "speedups": "auto,-compile"}
"""Settings of all runs. The rest are the defaults of flatout/config/schema.py."""
SHAPES: dict[str, dict[str, Any]] = {
    "transformer": {
        "model.kind": "transformer",
        "model.num_heads": 2,
        "model.activation": "relu2",
        "model.qk_norm": True,
    },
    "eigenstate": {
        "model.kind": "eigenstate",
        "model.num_heads": 4,
        "model.num_eigenstates": 92,
        "model.chunk_size": 32,
    },
}
TOKENS_PER_STEP = 4096
TUNED_AT, TUNING_SEED = 1024, 1000
RATES = {"muon": (4e-3, 8e-3, 16e-3), "adamw": (2e-3, 4e-3, 8e-3)}
"""Initial learning rates. The grid grows by factors of two while the best is at its edge."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optim.momentum": 0.9},
    "adamw": {"optim.betas": [0.9, 0.99]},
}
SEEDS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "muon": (
        *((1024, 1, STEPS), (4096, 1, STEPS), (256, 1, STEPS), (256, 1, LONGER)),
        *((1024, 2, STEPS), (4096, 2, STEPS), (256, 2, STEPS), (1024, 3, STEPS)),
    ),
    "adamw": ((1024, 1, STEPS), (1024, 2, STEPS)),
}
"""(length, seed, steps) of the runs with the tuned rate, in order."""
SPEED_LENGTHS = (256, 1024, 4096, 16384)
SPEED_TOKENS = 16384
"""Tokens per timed step, in one micro-batch."""
TIMED_S, MOST_TIMED = 2.0, 8
"""Steps are timed for TIMED_S seconds: at least two, and at most MOST_TIMED."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    model: str
    optimizer: str
    lr: float
    seq_len: int
    seed: int
    steps: int = STEPS


Run = Callable[[Trial], dict[str, Any]]
"""Returns the run's row: the trial and its results."""


def main() -> None:
    made = text_parser(__doc__, rounds=4)
    made.add_argument(
        "--part", choices=("loss", "speed"), required=True, help="speed needs an idle machine"
    )
    made.add_argument("--work", type=Path, default=Path("data/models"), help="data, finished runs")
    made.add_argument("--timed", nargs=2, metavar=("MODEL", "LENGTH"), help=argparse.SUPPRESS)
    arguments = made.parse_args()
    characters, cache = arguments.work / "characters", arguments.work / "models.jsonl"
    prepare(str(arguments.text), characters, tokenizer="char", workers=1)
    dataset = Dataset.open(characters)
    if arguments.timed:
        print(json.dumps(timed(arguments.timed[0], int(arguments.timed[1]), dataset)))
        return
    if arguments.part == "loss":
        torch.set_num_threads(1)
        measure_loss(dataset, cache)
    else:
        words = ["--part", "speed", "--text", str(arguments.text), "--work", str(arguments.work)]
        measure_speed([sys.executable, __file__, *words], arguments.rounds, cache)


def keep(part: str, found: dict[str, Any]) -> None:
    """Write the current results of a part; those of the other part stay."""
    path = RESULTS / "models.json"
    whole = read_json(path) if path.exists() else {}
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    whole[part] = {**facts(), "commit": code_state(), **machine, **found}
    publish(RESULTS, "models", whole, table(whole))


def configured(trial: Trial, dataset: Dataset) -> RunConfig:
    """Return the config of a training run."""
    keys = {"optim.kind": trial.optimizer, "optim.lr": trial.lr, **OPTIMIZERS[trial.optimizer]}
    keys |= {"data.seq_len": trial.seq_len, "batch.tokens_per_step": TOKENS_PER_STEP}
    keys |= {"train.steps": trial.steps, "train.seed": trial.seed, "data.path": str(dataset.path)}
    return load_config().with_values({**SHARED, **SHAPES[trial.model], **keys})


def measure_loss(dataset: Dataset, cache: Path) -> None:
    """Tune, then run the seeds. The results are written after every run."""
    rows: list[dict[str, Any]] = []
    fixed = {"tokens_per_step": TOKENS_PER_STEP, "tuned_at": TUNED_AT, "tuning_seed": TUNING_SEED}

    def run(trial: Trial) -> dict[str, Any]:
        key = {**asdict(trial), **OPTIMIZERS[trial.optimizer], "tokens_per_step": TOKENS_PER_STEP}
        key |= {"shared": SHARED, "shapes": SHAPES}
        row = asdict(trial) | remembered(key, cache, lambda: fitted(trial, dataset))
        if row not in rows:
            rows.append(row)
            keep("loss", {**fixed, "runs": rows})
        return row

    best = {}
    for optimizer, runs in SEEDS.items():
        best |= {(model, optimizer): tuned(model, optimizer, run) for model in SHAPES}
        for seq_len, seed, steps in runs:
            for model in SHAPES:
                run(Trial(model, optimizer, best[model, optimizer], seq_len, seed, steps))
    for model in SHAPES:
        for factor in (0.5, 2.0):
            run(Trial(model, "muon", best[model, "muon"] * factor, LENGTHS[-1], 1))


def fitted(trial: Trial, dataset: Dataset) -> dict[str, Any]:
    """Train a run to its end; return its size and its losses."""
    run = built(configured(trial, dataset), dataset)
    parameters = sum(parameter.numel() for parameter in run.core.parameters())
    return {"parameters": parameters, **trained(run, None)}


def tuned(model: str, optimizer: str, run: Run) -> float:
    """Return the best learning rate on the tuning seed, strictly inside the grid."""
    first = Trial(model, optimizer, 0.0, TUNED_AT, TUNING_SEED)
    best, _ = best_of_grid(RATES[optimizer], lambda rate: run(replace(first, lr=rate)))
    return best


def measure_speed(words: list[str], rounds: int, cache: Path) -> None:
    """Time both models at every length, alternating in fresh processes.

    The results are written after every measurement.
    """
    rows: list[dict[str, Any]] = []
    for number, seq_len in itertools.product(range(rounds), SPEED_LENGTHS):
        for model in list(SHAPES)[:: -1 if number % 2 else 1]:
            key = {"model": model, "seq_len": seq_len, "round": number, "tokens": SPEED_TOKENS}
            key |= {"threads": torch.get_num_threads()}
            command = [*words, "--timed", model, str(seq_len)]
            known = {**key, "shared": SHARED, "shapes": SHAPES}
            rows.append(key | remembered(known, cache, partial(json_of, command)))
            keep("speed", {"tokens": SPEED_TOKENS, "rounds": number + 1, "rows": rows})


def timed(model: str, seq_len: int, dataset: Dataset) -> dict[str, Any]:
    """Return the training rate in this process and its memory."""
    batch = {
        "data.seq_len": seq_len,
        "batch.tokens_per_step": SPEED_TOKENS,
        "batch.rows_per_device": SPEED_TOKENS // seq_len,
    }
    config = configured(Trial(model, "muon", 4e-3, seq_len, 1), dataset).with_values(batch)
    run = built(config, dataset)
    before = psutil.Process().memory_info().rss
    train_step(run, next(run.loader))
    seconds: list[float] = []
    while len(seconds) < 2 or (sum(seconds) < TIMED_S and len(seconds) < MOST_TIMED):
        batch_of_step = next(run.loader)
        began = time.perf_counter()
        float(train_step(run, batch_of_step).loss)
        seconds.append(time.perf_counter() - began)
    run.loader.close()
    return {
        "tokens_per_s": SPEED_TOKENS / statistics.median(seconds),
        "steps": len(seconds),
        "gib": (process_peak_bytes() - before) / GIB,
    }


def table(whole: dict[str, Any]) -> str:
    """Return the results of the parts that were measured as Markdown."""
    parts = {"loss": loss_table, "speed": speed_table}
    return "\n".join(write(whole[part]) for part, write in parts.items() if part in whole)


def loss_table(found: dict[str, Any]) -> str:
    """Return the table of losses by seed at the tuned rate, with a note on the rates."""
    runs, lines = found["runs"], []
    best = best_rates(runs, found["tuning_seed"])
    for optimizer, seq_len, steps in itertools.product(TITLES, LENGTHS, (STEPS, LONGER)):
        losses: dict[str, dict[int, float]] = {model: {} for model in SHAPES}
        for row in runs:
            case = (row["optimizer"], row["seq_len"], row["steps"], row["lr"])
            rate = best.get((row["model"], optimizer))
            if case == (optimizer, seq_len, steps, rate) and row["seed"] != found["tuning_seed"]:
                losses[row["model"]][row["seed"]] = loss_of(row)
        seeds = sorted(set.intersection(*(set(each) for each in losses.values())))
        if seeds:
            cells = [", ".join(f"{each[seed]:.3f}" for seed in seeds) for each in losses.values()]
            ours, other = losses["eigenstate"], losses["transformer"]
            apart = statistics.fmean(ours[seed] - other[seed] for seed in seeds)
            case = f"{TITLES[optimizer]}, T = {seq_len:,}, {steps} steps"
            lines.append((case, *cells, f"**{apart:+.3f}**"))
    sizes = {row["model"]: f"{row['parameters']:,} ({row['model']})" for row in runs}
    rates = "; ".join(
        f"{model}, {TITLES[optimizer]}: {rate:g}" for (model, optimizer), rate in best.items()
    )
    return markdown(
        "validation loss, by seed | transformer | eigenstate | eigenstate minus transformer, mean",
        lines,
        "Characters of Shakespeare, nats per token on the whole validation split;"
        f" {' and '.join(sizes.values())} parameters; steps of {found['tokens_per_step']:,}"
        f" tokens at every length; learning rates tuned at T = {found['tuned_at']:,}, {STEPS}"
        f" steps, on a different seed: {rates}. {beside(runs, best)}{found['machine']}, one thread,"
        f" torch {found['torch']}; commit {found['commit']}; `python benchmarks/models.py"
        " --part loss`.",
    )


def best_rates(runs: list[dict[str, Any]], tuning_seed: int) -> dict[tuple[str, str], float]:
    """Return the best rate on the tuning seed so far, by model and optimizer."""
    tuning = [row for row in sorted(runs, key=loss_of) if row["seed"] == tuning_seed]
    return {(row["model"], row["optimizer"]): row["lr"] for row in reversed(tuning)}


def beside(runs: list[dict[str, Any]], best: dict[tuple[str, str], float]) -> str:
    """Return the losses at half and twice the tuned rate at the longest length."""
    parts = []
    for (model, optimizer), rate in best.items():
        at_end = {
            row["lr"]: f"{loss_of(row):.3f}"
            for row in runs
            if (row["model"], row["optimizer"], row["seq_len"], row["seed"])
            == (model, optimizer, LENGTHS[-1], 1)
        }
        rates = (rate / 2, rate, rate * 2)
        if {*rates} <= at_end.keys():
            parts.append(f"{model} {', '.join(at_end[each] for each in rates)}")
    losses = f"losses at half, once and twice the rate: {'; '.join(parts)}"
    return f"At T = {LENGTHS[-1]:,}, {losses}. " if parts else ""


def speed_table(found: dict[str, Any]) -> str:
    """Return the table of rates and memory."""
    lines = []
    for seq_len in dict.fromkeys(row["seq_len"] for row in found["rows"]):
        each = {
            model: [
                row for row in found["rows"] if (row["model"], row["seq_len"]) == (model, seq_len)
            ]
            for model in SHAPES
        }
        rounds = min(map(len, each.values()))  # the last round may have one model alone
        rates = [[row["tokens_per_s"] for row in rows[:rounds]] for rows in each.values()]
        if rounds:
            gib = [
                f"{statistics.median(row['gib'] for row in rows[:rounds]):.2f}"
                for rows in each.values()
            ]
            times = f"**{spread(ratios(rates[1], rates[0]), 1)}**"
            lines.append((f"T = {seq_len:,}", *map(spread, rates), times, *gib))
    return markdown(
        "training, tokens/s | transformer | eigenstate | times faster | GiB, transformer |"
        " GiB, eigenstate",
        lines,
        f"The same models; steps of {found['tokens']:,} tokens in one micro-batch at every"
        f" length; {found['rounds']} rounds, interleaved in fresh processes, median (smallest"
        " to largest); GiB is the peak memory above that before the first step."
        f" {found['machine']}, {found['threads']} threads, torch {found['torch']}; commit"
        f" {found['commit']}; `python benchmarks/models.py --part speed`.",
    )


if __name__ == "__main__":
    main()
