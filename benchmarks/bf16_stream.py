"""The effect of bfloat16 hidden states on the loss: `bf16` with and without `bf16-stream`.

    OMP_NUM_THREADS=1 python benchmarks/bf16_stream.py --text shakespeare.txt

Trains on the characters of one text, on the CPU under bfloat16 autocast. The two runs of a seed
start from the same weights and see the same batches in the same order; the figure is the difference
of their losses on the whole validation split, with Student's t interval over the seeds. There are
three small models: a transformer, a deep and narrow one, and an eigenstate network. Each finished
run is stored in WORK/runs.jsonl; the same code does not repeat it. Writes
benchmarks/results/bf16_stream.json and .md. Losses are measured, not times, so the machine may be
busy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from main_job import RESULTS
from training_runs import built, code_state

from flatout import Dataset, load_config, prepare
from flatout.config.schema import RunConfig
from flatout.hardware import probe
from flatout.measure.trials.statistics import mean_of
from flatout.training.evaluation import score
from flatout.training.step import train_step

SHARED = {
    "optim.kind": "muon",
    "optim.lr": 6e-3,
    "optim.momentum": 0.9,
    "schedule.warmup": 0.05,
    "train.device": "cpu",
}
"""Settings of all runs; the rest are the defaults of flatout/config/schema.py."""
TRANSFORMER = {
    "model.kind": "transformer",
    "model.num_heads": 2,
    "model.activation": "relu2",
    "model.qk_norm": True,
}
EIGENSTATE = {
    "model.kind": "eigenstate",
    "model.num_heads": 4,
    "model.num_eigenstates": 32,
    "model.chunk_size": 32,
}
WITHOUT, WITH = "bf16", "bf16-stream"
SPEEDUPS = {
    WITHOUT: "auto,-compile,-bf16-products,+bf16",
    WITH: "auto,-compile,-bf16-products,+bf16,+bf16-stream",
}
FIRST_STEPS = 20
"""Number of steps over which the promise is checked, as in `bench`."""


@dataclass(frozen=True)
class Case:
    """A model and its training length."""

    name: str
    shape: dict[str, Any]
    num_layers: int
    d_model: int
    seq_len: int
    tokens_per_step: int
    steps: int


CASES = (
    Case(
        "transformer",
        TRANSFORMER,
        num_layers=4,
        d_model=128,
        seq_len=128,
        tokens_per_step=2048,
        steps=1000,
    ),
    Case(
        "eigenstate",
        EIGENSTATE,
        num_layers=4,
        d_model=128,
        seq_len=128,
        tokens_per_step=1024,
        steps=400,
    ),
    Case(
        "transformer, deep",
        TRANSFORMER,
        num_layers=12,
        d_model=64,
        seq_len=64,
        tokens_per_step=1024,
        steps=250,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        help="text file named by the dataset card `shakespeare`",
    )
    parser.add_argument("--seeds", type=int, default=3, help="at least 3")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("data/bf16_stream"),
        help="directory for prepared data and finished runs",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prepare(str(arguments.text), arguments.work / "characters", tokenizer="char", workers=1)
    dataset = Dataset.open(arguments.work / "characters")
    cases = [
        measure(case, dataset, range(1, arguments.seeds + 1), arguments.work / "runs.jsonl")
        for case in CASES
    ]
    found = {
        "machine": probe().describe(),
        "commit": code_state(),
        "torch": torch.__version__,
        "shared": SHARED,
        "speedups": SPEEDUPS,
        "cases": cases,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "bf16_stream.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "bf16_stream.md").write_text(table(found))
    print(table(found))


def measure(case: Case, dataset: Dataset, seeds: range, cache: Path) -> dict[str, Any]:
    """Run every seed with and without the speedup; return all runs and their summary."""
    pairs = [
        {way: remembered(case, dataset, way, seed, cache) for way in SPEEDUPS} for seed in seeds
    ]
    low, mean, high = mean_of(
        [pair[WITH]["val_loss"] - pair[WITHOUT]["val_loss"] for pair in pairs]
    )
    apart = [
        [abs(a / b - 1) for a, b in zip(pair[WITH]["losses"], pair[WITHOUT]["losses"], strict=True)]
        for pair in pairs
    ]
    return {
        **asdict(case),
        "difference": {"low": low, "mean": mean, "high": high},
        "first_steps_apart": max(max(each[:FIRST_STEPS]) for each in apart),
        "any_step_apart": max(max(each) for each in apart),
        "seed_deviation": statistics.stdev(pair[WITHOUT]["val_loss"] for pair in pairs),
        "runs": [
            {
                "seed": seed,
                "way": way,
                "first_loss": run["losses"][0],
                "last_losses": statistics.fmean(run["losses"][-20:]),
                "val_loss": run["val_loss"],
            }
            for seed, pair in zip(seeds, pairs, strict=True)
            for way, run in pair.items()
        ],
    }


def remembered(case: Case, dataset: Dataset, way: str, seed: int, cache: Path) -> dict[str, Any]:
    """Return the losses of a run, from the cache if the same code has run it before."""
    key = {"case": asdict(case), "shared": SHARED, "way": way, "seed": seed, "code": code_state()}
    if cache.exists():
        for text in cache.read_text().splitlines():
            if (known := json.loads(text))["key"] == key:
                return known["found"]
    found = trained(configured(case, dataset, way, seed), dataset)
    with cache.open("a") as file:
        file.write(json.dumps({"key": key, "found": found}) + "\n")
    print(f"{case.name}, seed {seed}, {way}: {found['val_loss']:.4f}", file=sys.stderr, flush=True)
    return found


def configured(case: Case, dataset: Dataset, way: str, seed: int) -> RunConfig:
    """Return the config of one run."""
    own = {
        "model.num_layers": case.num_layers,
        "model.d_model": case.d_model,
        "data.seq_len": case.seq_len,
    }
    length = {
        "batch.tokens_per_step": case.tokens_per_step,
        "train.steps": case.steps,
        "train.seed": seed,
    }
    return load_config().with_values(
        {
            **SHARED,
            **case.shape,
            **own,
            **length,
            "data.path": str(dataset.path),
            "speedups": SPEEDUPS[way],
        }
    )


def trained(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Train a run to its end; return the training losses and the loss on the validation split.

    Raises: SystemExit when it diverges.
    """
    run = built(config, dataset)
    losses = []
    for batch in run.feed:
        losses.append(float(train_step(run, batch).loss))
        run.step += 1
        if run.step == run.last_step:
            break
    run.feed.close()
    val_loss = score(run).loss
    if not math.isfinite(val_loss):
        raise SystemExit(f"Diverged: {config.to_dict()}")
    return {"losses": losses, "val_loss": val_loss}


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        (
            "| model | validation loss by seed, `bf16` | also with `bf16-stream` | difference, mean"
            " (95% interval) | deviation over seeds |"
        ),
        "|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        losses = {
            way: ", ".join(f"{run['val_loss']:.4f}" for run in case["runs"] if run["way"] == way)
            for way in SPEEDUPS
        }
        apart = case["difference"]
        difference = f"**{apart['mean']:+.4f}** ({apart['low']:+.4f} to {apart['high']:+.4f})"
        shape = f"{case['num_layers']} layers, d {case['d_model']}"
        lines.append(
            f"| {case['name']}, {shape} | {losses[WITHOUT]} | {losses[WITH]} | {difference} |"
            f" {case['seed_deviation']:.4f} |"
        )
    first = ", ".join(f"{case['first_steps_apart']:.0e}" for case in found["cases"])
    any_step = ", ".join(f"{case['any_step_apart']:.1%}" for case in found["cases"])
    lengths = "; ".join(
        f"{case['name']}: {case['steps']:,} steps of {case['tokens_per_step']:,} tokens, T ="
        f" {case['seq_len']}, from {max(run['first_loss'] for run in case['runs']):.2f}"
        for case in found["cases"]
    )
    lines += [
        "",
        (
            "Characters of Shakespeare, the whole validation split, in nats per token; autocast in"
            f" bfloat16 on a CPU, Muon, not compiled; {lengths}. The two runs of a seed have equal"
            " weights at the start and equal batches; a 95% interval (t) of their difference over"
            f" {len({run['seed'] for case in found['cases'] for run in case['runs']})} seeds."
            f" Training losses of one step differ by at most {first} (relative) over the first"
            f" {FIRST_STEPS} steps, where the promise is 2e-02, and by at most {any_step} at any"
            f" step. {found['machine']}, one thread, torch {found['torch']}; commit"
            f" {found['commit']}; `python benchmarks/bf16_stream.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
