"""A transformer and an eigenstate network of equal size and training tokens, by sequence length.

    OMP_NUM_THREADS=1 python benchmarks/models.py --part loss --text shakespeare.txt
    python benchmarks/models.py --part speed --text shakespeare.txt

Both models have 0.8 M parameters (4 layers, d 128; the number of eigenstates compensates for
attention's weights), and every step sees 4,096 characters, whatever the sequence length. The
learning rate of each model and optimizer is tuned at one length on a separate seed, over a grid of
factors of two that grows while the best rate is at its edge. That rate is used at every length with
other seeds. At the longest length half and twice the rate are tried too, to check that the choice
transfers; at the shortest, one run takes four times the steps.

`loss` compares validation losses and takes about 45 minutes on one core; the machine may be busy.
Each finished run is stored in WORK/models.jsonl; the same code does not repeat it. `speed` times
training steps of 16,384 tokens, alternating in fresh processes, with the peak memory above that
before the first step; the machine must be idle. Each part updates its section of
benchmarks/results/models.json, and models.md from both, after every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from main_job import RESULTS
from models_report import LENGTHS, LONGER, STEPS, loss_of, table
from training_runs import built, code_state, trained

from flatout import Dataset, load_config, prepare
from flatout.config.schema import RunConfig
from flatout.hardware import probe
from flatout.training.metrics.device import GIB, process_peak_bytes
from flatout.training.step import train_step

SHARED = {
    "model.num_layers": 4,
    "model.d_model": 128,
    "train.device": "cpu",
    "schedule.warmup": 0.05,
    "speedups": "auto,-compile",
}
"""Settings of all runs; the rest are the defaults of flatout/config/schema.py."""
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
"""Initial learning rates; the grid grows by factors of two while the best is at its edge."""
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
    arguments = parser().parse_args()
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
    print((RESULTS / "models.md").read_text())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--part",
        choices=("loss", "speed"),
        required=True,
        help="speed needs an otherwise idle machine",
    )
    made.add_argument(
        "--text", type=Path, required=True, help="text file named by the dataset card `shakespeare`"
    )
    made.add_argument("--rounds", type=int, default=4, help="repeats of each timing")
    made.add_argument(
        "--work",
        type=Path,
        default=Path("data/models"),
        help="directory for prepared data and finished runs",
    )
    made.add_argument(
        "--timed",
        nargs=2,
        metavar=("MODEL", "LENGTH"),
        help="time one model in this process and print the figures",
    )
    return made


def keep(part: str, found: dict[str, Any]) -> None:
    """Write the current figures of a part; those of the other part stay."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "models.json"
    whole = json.loads(path.read_text()) if path.exists() else {}
    facts = {
        "machine": probe().describe(),
        "commit": code_state(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    whole[part] = facts | found
    path.write_text(json.dumps(whole, indent=1) + "\n")
    (RESULTS / "models.md").write_text(table(whole))


def remembered(
    key: dict[str, Any], cache: Path, run: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of a run, from the cache if this code has run it before."""
    key = {**key, "shared": SHARED, "shapes": SHAPES, "code": code_state()}
    for text in cache.read_text().splitlines() if cache.exists() else ():
        if (known := json.loads(text))["key"] == json.loads(json.dumps(key)):
            return known["found"]
    found = run()
    with cache.open("a") as file:
        file.write(json.dumps({"key": key, "found": found}) + "\n")
    return found


def configured(trial: Trial, dataset: Dataset) -> RunConfig:
    """Return the config of a training run."""
    optim = {"optim.kind": trial.optimizer, "optim.lr": trial.lr, **OPTIMIZERS[trial.optimizer]}
    length = {
        "data.seq_len": trial.seq_len,
        "batch.tokens_per_step": TOKENS_PER_STEP,
        "train.steps": trial.steps,
        "train.seed": trial.seed,
    }
    return load_config().with_values(
        {**SHARED, **SHAPES[trial.model], **optim, **length, "data.path": str(dataset.path)}
    )


def measure_loss(dataset: Dataset, cache: Path) -> None:
    """Tune, then run the seeds; the figures are written after every run."""
    rows: list[dict[str, Any]] = []

    def run(trial: Trial) -> dict[str, Any]:
        key = {**asdict(trial), **OPTIMIZERS[trial.optimizer], "tokens_per_step": TOKENS_PER_STEP}
        row = asdict(trial) | remembered(key, cache, lambda: fitted(trial, dataset))
        if row not in rows:
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            keep(
                "loss",
                {
                    "tokens_per_step": TOKENS_PER_STEP,
                    "tuned_at": TUNED_AT,
                    "tuning_seed": TUNING_SEED,
                    "runs": rows,
                },
            )
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
    losses = {rate: loss_of(run(replace(first, lr=rate))) for rate in RATES[optimizer]}
    while True:
        best = min(losses, key=losses.__getitem__)
        if min(losses) < best < max(losses):
            return best
        rate = best / 2 if best == min(losses) else best * 2
        losses[rate] = loss_of(run(replace(first, lr=rate)))


def measure_speed(words: list[str], rounds: int, cache: Path) -> None:
    """Time both models at every length, alternating in fresh processes.

    The figures are written after every measurement.
    """
    rows: list[dict[str, Any]] = []
    for number, seq_len in itertools.product(range(rounds), SPEED_LENGTHS):
        for model in list(SHAPES)[:: -1 if number % 2 else 1]:
            key = {
                "model": model,
                "seq_len": seq_len,
                "round": number,
                "tokens": SPEED_TOKENS,
                "threads": torch.get_num_threads(),
            }
            rows.append(
                key
                | remembered(
                    key, cache, partial(in_a_process, [*words, "--timed", model, str(seq_len)])
                )
            )
            print(rows[-1], file=sys.stderr, flush=True)
            keep("speed", {"tokens": SPEED_TOKENS, "rounds": number + 1, "rows": rows})


def in_a_process(command: list[str]) -> dict[str, Any]:
    """Return the JSON in the last line of a command's output."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


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
    train_step(run, next(run.feed))
    seconds: list[float] = []
    while len(seconds) < 2 or (sum(seconds) < TIMED_S and len(seconds) < MOST_TIMED):
        batch_of_step = next(run.feed)
        began = time.perf_counter()
        float(train_step(run, batch_of_step).loss)
        seconds.append(time.perf_counter() - began)
    run.feed.close()
    return {
        "tokens_per_s": SPEED_TOKENS / statistics.median(seconds),
        "steps": len(seconds),
        "gib": (process_peak_bytes() - before) / GIB,
    }


if __name__ == "__main__":
    main()
