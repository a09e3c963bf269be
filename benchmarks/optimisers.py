"""Muon against AdamW: the share of tokens that Muon needs to reach AdamW's final loss.

    python benchmarks/optimisers.py --text shakespeare.txt --prose prose.jsonl \\
        --work data/optimisers

Two corpora (characters of one text, bytes of another), each with a small model; model, sequences,
batch, warm-up, clipping and schedule are the same for both optimisers, and every run completes the
schedule of its own length. Both are tuned on one seed over the same grid: AdamW with all the
tokens, also with another beta2, Muon with 0.65 of them, also with another momentum. Then both run
on three new seeds with their best setting, at several fractions of the tokens. Every run is in
benchmarks/results/optimisers.json, from which the table and the picture next to it are made.
WORK/runs.jsonl has each finished run. The same code does not repeat it. About an hour on one core.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from charts import Curve, beside, chart
from measurement import facts, markdown, publish, text_parser
from training_runs import best_of_grid, built, code_state, loss_of, remembered, trained

from flatout import Dataset, load_config, prepare
from flatout.config.schema import RunConfig
from flatout.measure.intervals import mean_of

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
"""Settings of both optimisers and corpora. The rest are the defaults of the schema."""
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
"""Initial learning rates. The grid grows by factors of two while the best is at its edge."""
WEIGHT_DECAYS = (0.1, 0.0)
"""The first is tried with every rate, the other around the best rate of the first."""
OTHER_DECAY = {"adamw": ("beta2", 0.99), "muon": ("momentum", 0.9)}
"""A decay rate of each optimiser, also tried around the best learning rate; default 0.95."""
TUNING_SEED, SEEDS = 1000, (1, 2, 3)
TUNED_AT = {"adamw": 1.0, "muon": 0.65}
"""Fraction of the tokens used to tune each optimiser."""
FRACTIONS = {"adamw": (0.5, 1.0), "muon": (0.35, 0.5, 0.65)}
"""Fractions of the tokens, each a separate run with the tuned setting."""

NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLOURS = {"adamw": "#d1603d", "muon": "#3d7dd1"}


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


SHAPE = {"model.num_layers": 2, "model.d_model": 96, "model.num_heads": 3, "data.seq_len": 64}
TEXTS = ("characters", "characters of Shakespeare", "char")
PROSE = ("prose", "bytes of English prose", "byte")
CORPORA = (Corpus(*TEXTS, 2_048_000, None, SHAPE), Corpus(*PROSE, 2_048_000, 131_072, SHAPE))


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
    made = text_parser(__doc__)
    made.add_argument("--prose", type=Path, required=True, help="text, or JSON lines with `text`")
    made.add_argument("--work", type=Path, default=Path("data/optimisers"), help="data, runs")
    given = made.parse_args()
    torch.set_num_threads(1)
    state = code_state()  # computed now, since files may change during the measurements
    corpora = []
    for corpus, source in zip(CORPORA, (given.text, given.prose), strict=True):
        data = given.work / corpus.name
        prepare(str(source), data, tokenizer=corpus.tokenizer, workers=1)
        corpora.append(measure(corpus, Dataset.open(data), given.work / "runs.jsonl"))
    found = {
        **facts(),
        "commit": state,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shared": SHARED,
        "rates": RATES,
        "weight_decays": WEIGHT_DECAYS,
        "other_decay": OTHER_DECAY,
        "tuning_seed": TUNING_SEED,
        "tuned_at": TUNED_AT,
        "seeds": SEEDS,
        "corpora": corpora,
    }
    publish(given.out, "optimisers", found, table(found))
    (given.out / "optimisers.svg").write_text(picture(found))


def measure(corpus: Corpus, dataset: Dataset, cache: Path) -> dict[str, Any]:
    """Tune both optimisers and run the seeds; return every run of the corpus and a summary."""
    rows: list[dict[str, Any]] = []

    def trial(setting: Setting, fraction: float, seed: int) -> dict[str, Any]:
        row = fitted(corpus, dataset, setting, fraction, seed, cache)
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
    rows: list[dict[str, Any]] = []

    def line(setting: Setting, rates: Iterable[float]) -> None:
        """Try a setting with several rates, adding more until the best is inside the grid."""
        fraction = TUNED_AT[kind]
        _, tried = best_of_grid(
            rates, lambda rate: trial(replace(setting, lr=rate), fraction, TUNING_SEED)
        )
        rows.extend(tried)

    line(Setting(kind, 0.0, first), RATES)
    name, value = OTHER_DECAY[kind]
    for change in (*({"weight_decay": other} for other in others), {name: value}):
        best = lowest(rows)
        line(replace(best, **change), (best.lr / 2, best.lr, best.lr * 2))
    return lowest(rows)


def lowest(rows: list[dict[str, Any]]) -> Setting:
    """Return the setting with the lowest loss. A diverged run counts as infinite."""
    row = min(rows, key=loss_of)
    return Setting(row["kind"], row["lr"], row["weight_decay"], row["beta2"], row["momentum"])


def configured(
    corpus: Corpus, dataset: Dataset, setting: Setting, fraction: float, seed: int
) -> RunConfig:
    """Return the config of one run."""
    steps = round(corpus.tokens * fraction / SHARED["batch.tokens_per_step"])
    keys = {"train.steps": steps, "train.seed": seed, "data.path": str(dataset.path)}
    keys |= {"optim.kind": setting.kind, "optim.lr": setting.lr, "optim.momentum": setting.momentum}
    keys |= {"optim.weight_decay": setting.weight_decay, "optim.betas": [0.9, setting.beta2]}
    return load_config().with_values({**SHARED, **corpus.shape, **keys})


def fitted(
    corpus: Corpus, dataset: Dataset, setting: Setting, fraction: float, seed: int, cache: Path
) -> dict[str, Any]:
    """Return the row of a run, from the cache if this code has run it before."""
    trial = {**asdict(setting), "fraction": fraction, "seed": seed}

    def run() -> dict[str, Any]:
        made = built(configured(corpus, dataset, setting, fraction, seed), dataset)
        tokens = made.last_step * made.tokens_per_step
        return {"tokens": tokens, **trained(made, corpus.eval_tokens)}

    return {
        **trial,
        **remembered({"corpus": asdict(corpus), "shared": SHARED, **trial}, cache, run),
    }


def summary(
    rows: list[dict[str, Any]], settings: dict[str, dict[str, Any]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the losses by optimiser and fraction, and the fraction of the tokens that Muon needs.

    A seed fixes the initial weights and the order of the sequences, so both optimisers do the same
    task for each seed. The fraction is given per seed and over all.
    """
    curves: dict[str, dict[float, list[float]]] = {}
    for kind, setting in settings.items():
        chosen = [
            row
            for row in rows
            if row["seed"] in seeds and all(row[key] == value for key, value in setting.items())
        ]
        fractions = sorted({row["fraction"] for row in chosen})
        by_seed = {(row["fraction"], row["seed"]): row["val_loss"] for row in chosen}
        curves[kind] = {
            fraction: [by_seed[fraction, seed] for seed in seeds] for fraction in fractions
        }
    needed = [
        crossing([(fraction, losses[n]) for fraction, losses in curves["muon"].items()], target)
        for n, target in enumerate(curves["adamw"][1.0])
    ]
    known = [fraction for fraction in needed if fraction is not None]
    is_whole = len(known) == len(needed)
    low, mean, high = mean_of(known) if is_whole else (None, None, None)
    return {
        "curves": {
            kind: [{"fraction": each, "val_losses": losses} for each, losses in curve.items()]
            for kind, curve in curves.items()
        },
        "needed_by_seed": needed,
        "needed": mean,
        "interval_95": (low, high) if is_whole else None,
    }


def crossing(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the fraction at which a falling curve of (fraction, loss) reaches `target`.

    Interpolates linearly in the logarithm of the fraction. None when the curve does not reach it.
    """
    for (before, above), (after, below) in pairwise(points):
        if above >= target >= below:
            share = (above - target) / (above - below) if above > below else 0.0
            return before * (after / before) ** share
    return None


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = []
    for corpus in found["corpora"]:
        losses = [loss_cell(corpus, "adamw", 1.0), loss_cell(corpus, "muon", 0.65)]
        if corpus["needed"] is None:
            first, last = (corpus["curves"]["muon"][n]["fraction"] for n in (0, -1))
            needed = f"not between {first:g} and {last:g} for every seed"
        else:
            low, high = corpus["interval_95"]
            needed = f"**{corpus['needed']:.2f}** ({low:.2f} to {high:.2f})"
        lines.append((f"{corpus['title']}, {corpus['tokens'] / 1e6:.2f} M", *losses, needed))
    return markdown(
        "corpus, all tokens | AdamW: loss by seed | Muon, 0.65 of the tokens: loss by seed |"
        " tokens Muon needs for AdamW's loss",
        lines,
        small_print(found),
    )


def loss_cell(corpus: dict[str, Any], kind: str, fraction: float) -> str:
    """Return an optimiser's setting and its losses at a fraction of the tokens."""
    setting, (other, _) = corpus["best"][kind], OTHER_DECAY[kind]
    losses = next(
        point["val_losses"] for point in corpus["curves"][kind] if point["fraction"] == fraction
    )
    words = f"lr {setting['lr']:g}, decay {setting['weight_decay']:g}, {other} {setting[other]:g}"
    return f"{words}: {', '.join(f'{loss:.4f}' for loss in losses)}"


def small_print(found: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:g}" for rate in found["rates"])
    decays = " and ".join(f"{decay:g}" for decay in found["weight_decays"])
    shapes = "; ".join(
        f"{c['name']}: {c['shape']['model.num_layers']} layers of width"
        f" {c['shape']['model.d_model']}, sequences of {c['shape']['data.seq_len']}"
        for c in found["corpora"]
    )
    runs = sum(len(corpus["runs"]) for corpus in found["corpora"])
    return (
        f"{shapes}; {found['shared']['batch.tokens_per_step']:,} tokens per step, cosine schedule"
        f" over each run's own length. Both tuned on seed {found['tuning_seed']}: learning rates"
        f" {rates} (extended by factors of 2 until the best is inside) and weight decay {decays};"
        f" also AdamW with beta2 {found['other_decay']['adamw'][1]}, Muon with momentum"
        f" {found['other_decay']['muon'][1]}; AdamW with all the tokens, Muon with"
        f" {found['tuned_at']['muon']} of them. Then seeds {', '.join(map(str, found['seeds']))}:"
        " validation loss in nats per token; the last column is a fraction, the mean over the seeds"
        f" with its 95% interval (t, seed by seed). All {runs} runs are in the JSON."
        f" {found['machine']}, {found['threads']} thread; torch {found['torch']}; commit"
        f" {found['commit']}; `python benchmarks/optimisers.py`."
    )


def picture(found: dict[str, Any]) -> str:
    """Return final loss against tokens as SVG, one chart per corpus."""
    charts = []
    for corpus in found["corpora"]:
        curves, losses, fractions = [], [], set()
        for kind, points in corpus["curves"].items():
            dots = [(math.log(p["fraction"]), loss) for p in points for loss in p["val_losses"]]
            means = [(math.log(p["fraction"]), statistics.mean(p["val_losses"])) for p in points]
            curves.append(Curve(f"{NAMES[kind]}, tuned", COLOURS[kind], [means], dots))
            losses += [loss for _, loss in dots]
            fractions |= {p["fraction"] for p in points}
            if kind == "adamw":
                dashed = (means[-1][1], COLOURS[kind])
        low, high = min(losses), max(losses)
        heights = [low + number / 4 * (high - low) for number in range(5)]
        charts.append(
            chart(
                corpus["title"],
                "million training tokens per run (each point is a whole run)",
                curves,
                across={math.log(f): f"{corpus['tokens'] * f / 1e6:.2f}" for f in fractions},
                down={height: f"{height:.2f}" for height in heights},
                dashed=dashed,
            )
        )
    return beside(charts)


if __name__ == "__main__":
    main()
