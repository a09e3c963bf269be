"""Muon against AdamW: the share of tokens that Muon needs to reach AdamW's final loss.

    python benchmarks/optimisers.py --text shakespeare.txt --prose prose.jsonl \\
        --work data/optimisers

There are two corpora (characters of one text, bytes of another), each with a small model. Model,
sequences, batch, warm-up, clipping and schedule are the same for both optimisers; every run
completes the schedule of its own length. Both are tuned on one seed over the same grid: AdamW with
all the tokens, Muon with 0.65 of them; AdamW also with another beta2, Muon with another momentum.
Then both run on three new seeds with their best setting, at several fractions of the tokens. All
results are in benchmarks/results/optimisers.json in the order of the runs; the table and the
picture next to it are made from them.

Each finished run is stored in WORK/runs.jsonl; the same code (`code_state`) does not repeat it. All
runs take about an hour on one core. `--cost` measures the time per step of each optimiser instead,
and needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from main_job import RESULTS
from optimisers_report import picture, summary, table
from training_runs import built, code_state, trained

from flatout import Dataset, load_config, prepare
from flatout.config.schema import RunConfig
from flatout.hardware import probe
from flatout.training.step import train_step

SHARED = {
    "model.norm": "rmsnorm",
    "model.activation": "relu2",
    "model.qk_norm": True,
    "batch.tokens_per_step": 2048,
    "schedule.kind": "cosine",
    "schedule.warmup": 0.05,
    "optim.clip": 1.0,
    "train.device": "cpu",
    "train.precision": "fp32",
    "speedups": "auto,-compile",
}
"""Settings of both optimisers and corpora.

Dropout is 0; the rest are the defaults of flatout/config/schema.py.
"""

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
"""Initial learning rates; the grid grows by factors of two while the best is at its edge."""
WEIGHT_DECAYS = (0.1, 0.0)
"""The first is tried with every rate, the other around the best rate of the first."""
OTHER_DECAY = {"adamw": ("beta2", 0.99), "muon": ("momentum", 0.9)}
"""A decay rate of each optimiser, also tried around the best learning rate; default 0.95."""
TUNING_SEED, SEEDS = 1000, (1, 2, 3)
TUNED_AT = {"adamw": 1.0, "muon": 0.65}
"""Fraction of the tokens used to tune each optimiser."""
FRACTIONS = {"adamw": (0.5, 1.0), "muon": (0.35, 0.5, 0.65)}
"""Fractions of the tokens, each a separate run with the tuned setting."""


@dataclass(frozen=True)
class Corpus:
    """A text, its tokenizer, the model that learns it, and the number of tokens."""

    name: str
    title: str
    tokenizer: str
    tokens: int
    """Training tokens of AdamW."""
    eval_tokens: int | None
    """Validation tokens scored, from the start of the split; None for all."""
    shape: dict[str, Any]


CORPORA = (
    Corpus(
        "characters",
        "characters of Shakespeare",
        "char",
        2_048_000,
        None,
        {"model.num_layers": 2, "model.d_model": 96, "model.num_heads": 3, "data.seq_len": 64},
    ),
    Corpus(
        "prose",
        "bytes of English prose",
        "byte",
        2_048_000,
        131_072,
        {"model.num_layers": 2, "model.d_model": 96, "model.num_heads": 3, "data.seq_len": 64},
    ),
)


@dataclass(frozen=True)
class Setting:
    """The tuned hyperparameters."""

    kind: str
    lr: float
    weight_decay: float
    beta2: float = 0.95
    """For AdamW, also for the AdamW used alongside Muon."""
    momentum: float = 0.95
    """For Muon."""


Trial = Callable[[Setting, float, int], dict[str, Any]]
"""(setting, fraction of the tokens, seed) -> the run's row."""


def main() -> None:
    arguments = parser().parse_args()
    torch.set_num_threads(1)
    code_state()  # computed now, since files may change during the measurements
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "optimisers.json"
    sources = {"characters": arguments.text, "prose": arguments.prose}
    datasets = {
        corpus.name: prepared(corpus, sources[corpus.name], arguments.work / corpus.name)
        for corpus in CORPORA
    }
    found = json.loads(kept.read_text()) if kept.exists() else {}
    if arguments.cost:
        costs = {corpus.name: step_ms(corpus, datasets[corpus.name]) for corpus in CORPORA}
        found["cost"] = {"machine": probe().describe(), "commit": code_state(), "corpora": costs}
    else:
        found |= {
            **facts(),
            "corpora": [
                measure(corpus, datasets[corpus.name], arguments.work / "runs.jsonl")
                for corpus in CORPORA
            ],
        }
    kept.write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "optimisers.md").write_text(table(found))
    (RESULTS / "optimisers.svg").write_text(picture(found))
    print(table(found))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--text", type=Path, required=True, help="text file named by the dataset card `shakespeare`"
    )
    made.add_argument(
        "--prose",
        type=Path,
        required=True,
        help="English prose: text files, or JSON lines with a `text` field",
    )
    made.add_argument(
        "--work",
        type=Path,
        default=Path("data/optimisers"),
        help="directory for prepared data and finished runs",
    )
    made.add_argument(
        "--cost",
        action="store_true",
        help="measure the time per step instead, and add it to the results",
    )
    return made


def prepared(corpus: Corpus, source: Path, out: Path) -> Dataset:
    """Return the dataset of a corpus, preparing it if necessary."""
    prepare(str(source), out, tokenizer=corpus.tokenizer, workers=1)
    return Dataset.open(out)


def facts() -> dict[str, Any]:
    """Return the facts common to all runs."""
    return {
        "machine": probe().describe(),
        "commit": code_state(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shared": SHARED,
        "rates": RATES,
        "weight_decays": WEIGHT_DECAYS,
        "other_decay": OTHER_DECAY,
        "tuning_seed": TUNING_SEED,
        "tuned_at": TUNED_AT,
        "seeds": SEEDS,
    }


def measure(corpus: Corpus, dataset: Dataset, cache: Path) -> dict[str, Any]:
    """Tune both optimisers and run the seeds; return every run of the corpus and a summary."""
    rows: list[dict[str, Any]] = []

    def trial(setting: Setting, fraction: float, seed: int) -> dict[str, Any]:
        row = remembered(corpus, dataset, setting, fraction, seed, cache)
        if row not in rows:
            rows.append(row)
        return row

    best = {kind: tuned(kind, trial) for kind in ("adamw", "muon")}
    for kind, setting in best.items():
        for fraction in FRACTIONS[kind]:
            for seed in SEEDS:
                trial(setting, fraction, seed)
    splits = {
        name: {"tokens": split.tokens, "text_bytes": split.text_bytes}
        for name, split in dataset.manifest.splits.items()
    }
    described = {**asdict(corpus), "vocab_size": dataset.vocab_size, "splits": splits}
    settings = {kind: asdict(setting) for kind, setting in best.items()}
    return {**described, "best": settings, "runs": rows, **summary(rows, settings, SEEDS)}


def tuned(kind: str, trial: Trial) -> Setting:
    """Return the best setting of the grid on the tuning seed."""
    first, *others = WEIGHT_DECAYS
    rows = line(Setting(kind, 0.0, first), RATES, trial)
    for weight_decay in others:
        rows += line(
            replace(lowest(rows), weight_decay=weight_decay), around(lowest(rows).lr), trial
        )
    name, value = OTHER_DECAY[kind]
    rows += line(replace(lowest(rows), **{name: value}), around(lowest(rows).lr), trial)
    return lowest(rows)


def line(setting: Setting, rates: Iterable[float], trial: Trial) -> list[dict[str, Any]]:
    """Try a setting with several learning rates, adding more until the best is inside the grid."""
    fraction = TUNED_AT[setting.kind]
    rows = [trial(replace(setting, lr=rate), fraction, TUNING_SEED) for rate in rates]
    while True:
        tried = sorted(row["lr"] for row in rows)
        best = lowest(rows).lr
        if tried[0] < best < tried[-1]:
            return rows
        rows.append(
            trial(
                replace(setting, lr=best / 2 if best == tried[0] else best * 2),
                fraction,
                TUNING_SEED,
            )
        )


def around(rate: float) -> tuple[float, float, float]:
    return rate / 2, rate, rate * 2


def lowest(rows: list[dict[str, Any]]) -> Setting:
    """Return the setting with the lowest loss; a diverged run counts as infinite."""
    row = min(rows, key=lambda row: math.inf if row["val_loss"] is None else row["val_loss"])
    return Setting(row["kind"], row["lr"], row["weight_decay"], row["beta2"], row["momentum"])


def configured(
    corpus: Corpus, dataset: Dataset, setting: Setting, fraction: float, seed: int
) -> RunConfig:
    """Return the config of one run."""
    steps = round(corpus.tokens * fraction / SHARED["batch.tokens_per_step"])
    optim = {
        "optim.kind": setting.kind,
        "optim.lr": setting.lr,
        "optim.weight_decay": setting.weight_decay,
    }
    optim |= {"optim.betas": [0.9, setting.beta2], "optim.momentum": setting.momentum}
    return load_config().with_values(
        {
            **SHARED,
            **corpus.shape,
            **optim,
            "train.steps": steps,
            "train.seed": seed,
            "data.path": str(dataset.path),
        }
    )


def remembered(
    corpus: Corpus, dataset: Dataset, setting: Setting, fraction: float, seed: int, cache: Path
) -> dict[str, Any]:
    """Return the row of a run, from the cache if this code has run it before."""
    trial = {**asdict(setting), "fraction": fraction, "seed": seed}
    key = {"corpus": asdict(corpus), "shared": SHARED, "code": code_state(), **trial}
    if cache.exists():
        for text in cache.read_text().splitlines():
            if (known := json.loads(text))["key"] == key:
                return {**trial, **known["found"]}
    run = built(configured(corpus, dataset, setting, fraction, seed), dataset)
    found = {"tokens": run.last_step * run.tokens_per_step, **trained(run, corpus.eval_tokens)}
    with cache.open("a") as file:
        file.write(json.dumps({"key": key, "found": found}) + "\n")
    print(f"{corpus.name}: {trial} {found}", file=sys.stderr, flush=True)
    return {**trial, **found}


def step_ms(
    corpus: Corpus, dataset: Dataset, *, rounds: int = 15, steps: int = 20
) -> dict[str, Any]:
    """Return the median time per step of each optimiser, measured alternately."""
    runs = {
        kind: built(configured(corpus, dataset, Setting(kind, 1e-3, 0.1), 1.0, 0), dataset)
        for kind in ("adamw", "muon")
    }
    taken: dict[str, list[float]] = {kind: [] for kind in runs}
    for number in range(rounds + 1):
        for kind, run in runs.items():
            batches = [next(run.feed) for _ in range(steps)]
            began = time.perf_counter()
            for batch in batches:
                train_step(run, batch)
            if number:  # the first round warms up
                taken[kind].append((time.perf_counter() - began) / steps * 1e3)
    for run in runs.values():
        run.feed.close()
    ratios = [muon / adamw for muon, adamw in zip(taken["muon"], taken["adamw"], strict=True)]
    medians = {f"{kind}_step_ms": statistics.median(times) for kind, times in taken.items()}
    return {
        **medians,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
