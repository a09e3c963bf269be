"""The tables of models.py: validation losses, and training rates with their memory."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

from main_job import spread

MODELS = ("transformer", "eigenstate")
TITLES = {"muon": "Muon", "adamw": "AdamW"}
LENGTHS = (256, 1024, 4096)
STEPS, LONGER = 200, 800


def table(whole: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    return (
        "\n".join(
            text
            for part, write in (("loss", loss_table), ("speed", speed_table))
            if part in whole
            for text in write(whole[part])
        )
        + "\n"
    )


def loss_table(found: dict[str, Any]) -> list[str]:
    """Return the table of losses by seed at the tuned rate, with a note on the rates."""
    runs = found["runs"]
    best = best_rates(runs, found["tuning_seed"])
    lines = [
        (
            "| validation loss, by seed | transformer | eigenstate | eigenstate minus transformer,"
            " mean |"
        ),
        "|---|---|---|---|",
    ]
    for optimizer, seq_len, steps in itertools.product(TITLES, LENGTHS, (STEPS, LONGER)):
        losses: dict[str, dict[int, float]] = {model: {} for model in MODELS}
        for row in runs:
            is_tuned = (
                row["lr"] == best[row["model"], row["optimizer"]]
                and row["seed"] != found["tuning_seed"]
            )
            if is_tuned and (row["optimizer"], row["seq_len"], row["steps"]) == (
                optimizer,
                seq_len,
                steps,
            ):
                losses[row["model"]][row["seed"]] = loss_of(row)
        seeds = sorted(set.intersection(*(set(each) for each in losses.values())))
        if seeds:
            cells = [", ".join(f"{each[seed]:.3f}" for seed in seeds) for each in losses.values()]
            apart = statistics.fmean(
                losses["eigenstate"][seed] - losses["transformer"][seed] for seed in seeds
            )
            lines.append(
                f"| {TITLES[optimizer]}, T = {seq_len:,}, {steps} steps | {' | '.join(cells)} |"
                f" **{apart:+.3f}** |"
            )
    sizes = {row["model"]: f"{row['parameters']:,} ({row['model']})" for row in runs}
    rates = "; ".join(
        f"{model}, {TITLES[optimizer]}: {rate:g}" for (model, optimizer), rate in best.items()
    )
    return [
        *lines,
        "",
        (
            "Characters of Shakespeare, nats per token on the whole validation split;"
            f" {' and '.join(sizes.values())} parameters; steps of {found['tokens_per_step']:,}"
            f" tokens at every length; learning rates tuned at T = {found['tuned_at']:,}, {STEPS}"
            f" steps, on another seed: {rates}. {beside(runs, best)}{found['machine']}, one thread,"
            f" torch {found['torch']}; commit {found['commit']}; `python benchmarks/models.py"
            " --part loss`."
        ),
        "",
    ]


def best_rates(runs: list[dict[str, Any]], tuning_seed: int) -> dict[tuple[str, str], float]:
    """Return the best rate on the tuning seed so far, by model and optimizer."""
    tuning = [row for row in sorted(runs, key=loss_of) if row["seed"] == tuning_seed]
    return {(row["model"], row["optimizer"]): row["lr"] for row in reversed(tuning)}


def beside(runs: list[dict[str, Any]], best: dict[tuple[str, str], float]) -> str:
    """Return the losses at half and twice the tuned rate at the longest length."""
    parts = []
    for (model, optimizer), rate in best.items():
        at_end = {
            row["lr"]: row
            for row in runs
            if (row["model"], row["optimizer"], row["seq_len"], row["seed"])
            == (model, optimizer, LENGTHS[-1], 1)
        }
        if {rate / 2, rate, rate * 2} <= at_end.keys():
            losses = (loss_of(at_end[each]) for each in (rate / 2, rate, rate * 2))
            parts.append(f"{model} {', '.join(f'{loss:.3f}' for loss in losses)}")
    return (
        f"At T = {LENGTHS[-1]:,}, losses at half, once and twice the rate: {'; '.join(parts)}. "
        if parts
        else ""
    )


def speed_table(found: dict[str, Any]) -> list[str]:
    """Return the table of rates and memory."""
    lines = [
        (
            "| training, tokens/s | transformer | eigenstate | times faster | GiB, transformer |"
            " GiB, eigenstate |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for seq_len in dict.fromkeys(row["seq_len"] for row in found["rows"]):
        rows = {
            model: {
                row["round"]: row
                for row in found["rows"]
                if (row["model"], row["seq_len"]) == (model, seq_len)
            }
            for model in MODELS
        }
        rounds = sorted(set.intersection(*(set(each) for each in rows.values())))
        if not rounds:
            continue
        rates = {
            model: [rows[model][number]["tokens_per_s"] for number in rounds] for model in MODELS
        }
        ratios = [
            new / old for new, old in zip(rates["eigenstate"], rates["transformer"], strict=True)
        ]
        gib = [
            f"{statistics.median(rows[model][number]['gib'] for number in rounds):.2f}"
            for model in MODELS
        ]
        lines.append(
            f"| T = {seq_len:,} | {spread(rates['transformer'])} | {spread(rates['eigenstate'])} |"
            f" **{spread(ratios, 1)}** | {' | '.join(gib)} |"
        )
    return [
        *lines,
        "",
        (
            f"The same models; steps of {found['tokens']:,} tokens in one micro-batch at every"
            f" length; {found['rounds']} rounds, interleaved in fresh processes, median (smallest"
            " to largest); GiB is the peak memory above that before the first step."
            f" {found['machine']}, {found['threads']} threads, torch {found['torch']}; commit"
            f" {found['commit']}; `python benchmarks/models.py --part speed`."
        ),
    ]


def loss_of(row: dict[str, Any]) -> float:
    """Return the validation loss of a run, or infinity if it diverged."""
    return math.inf if row["val_loss"] is None else float(row["val_loss"])


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/models.py; run: python benchmarks/models.py --help"
    )
