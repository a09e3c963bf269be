"""The report of optimisers.py: the fraction of tokens that Muon needs, a table and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

Scale = Callable[[float], float]
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided 95% interval, by the number of values."""
NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLOURS = {"adamw": "#d1603d", "muon": "#3d7dd1"}
GREY = "#757b86"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 330, 60, 40, 20, 50
"""Size and margins of one panel of the picture, in pixels."""


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
    target = curves["adamw"][1.0]
    muon = curves["muon"]
    needed = [
        crossing([(fraction, losses[n]) for fraction, losses in muon.items()], target[n])
        for n in range(len(seeds))
    ]
    known = [fraction for fraction in needed if fraction is not None]
    whole = len(known) == len(needed)
    listed = {
        kind: [{"fraction": fraction, "val_losses": losses} for fraction, losses in curve.items()]
        for kind, curve in curves.items()
    }
    over_seeds = (
        {"needed": statistics.mean(known), "interval_95": interval(known)}
        if whole
        else {"needed": None, "interval_95": None}
    )
    return {"curves": listed, "needed_by_seed": needed, **over_seeds}


def crossing(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the fraction at which a falling curve of (fraction, loss) reaches `target`.

    Interpolates linearly in the logarithm of the fraction. None when the curve does not reach it.
    """
    for (before, above), (after, below) in pairwise(points):
        if above >= target >= below:
            share = (above - target) / (above - below) if above > below else 0.0
            return before * (after / before) ** share
    return None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of a few values."""
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        (
            "| corpus, all tokens | AdamW: loss by seed | Muon, 0.65 of the tokens: loss by seed |"
            " tokens Muon needs for AdamW's loss |"
        ),
        "|---|---|---|---|",
    ]
    for corpus in found.get("corpora", []):
        adamw, muon = (
            loss_cell(corpus, kind, fraction) for kind, fraction in (("adamw", 1.0), ("muon", 0.65))
        )
        lines.append(
            f"| {corpus['title']}, {corpus['tokens'] / 1e6:.2f} M | {adamw} | {muon} |"
            f" {needed_cell(corpus)} |"
        )
    if "corpora" in found:
        lines += ["", _small_print(found)]
    if "cost" in found:
        costs = "; ".join(
            f"{name}: {cost['ratio']:.2f} times" for name, cost in found["cost"]["corpora"].items()
        )
        lines += [
            "",
            (
                f"Time per step of Muon relative to AdamW ({found['cost']['machine']}, one thread,"
                f" alternating, median): {costs}."
            ),
        ]
    return "\n".join(lines) + "\n"


def loss_cell(corpus: dict[str, Any], kind: str, fraction: float) -> str:
    """Return an optimiser's setting and its losses at a fraction of the tokens."""
    setting = corpus["best"][kind]
    losses = next(
        point["val_losses"] for point in corpus["curves"][kind] if point["fraction"] == fraction
    )
    decay = f"lr {setting['lr']:g}, decay {setting['weight_decay']:g}"
    other = (
        f"beta2 {setting['beta2']:g}" if kind == "adamw" else f"momentum {setting['momentum']:g}"
    )
    return f"{decay}, {other}: {', '.join(f'{loss:.4f}' for loss in losses)}"


def needed_cell(corpus: dict[str, Any]) -> str:
    """Return the fraction of the tokens with its interval."""
    if corpus["needed"] is None:
        first, last = (corpus["curves"]["muon"][n]["fraction"] for n in (0, -1))
        return f"not between {first:g} and {last:g} for every seed"
    low, high = corpus["interval_95"]
    return f"**{corpus['needed']:.2f}** ({low:.2f} to {high:.2f})"


def _small_print(found: dict[str, Any]) -> str:
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
    """Return final loss against tokens as SVG, one panel per corpus, for light and dark pages."""
    panels = [
        _panel(corpus, number * WIDTH) for number, corpus in enumerate(found.get("corpora", []))
    ]
    width = WIDTH * max(1, len(panels))
    size = f'width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}"'
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    return "\n".join([opening, *panels, "</svg>"]) + "\n"


def _panel(corpus: dict[str, Any], offset: int) -> str:
    losses = [
        loss
        for curve in corpus["curves"].values()
        for point in curve
        for loss in point["val_losses"]
    ]
    fractions = sorted(
        {point["fraction"] for curve in corpus["curves"].values() for point in curve}
    )
    margin = 0.08 * (max(losses) - min(losses))
    across = _scale(math.log(fractions[0]), math.log(fractions[-1]), LEFT + 15, WIDTH - RIGHT - 15)
    down = _scale(max(losses) + margin, min(losses) - margin, TOP, HEIGHT - BOTTOM)
    drawn = _axes(corpus, fractions, losses, across, down)
    for number, (kind, curve) in enumerate(corpus["curves"].items()):
        drawn += _curve(curve, across, down, COLOURS[kind])
        label_y = TOP + 16 * (number + 1)
        drawn.append(
            _text(WIDTH - RIGHT - 8, label_y, f"{NAMES[kind]}, tuned", "end", COLOURS[kind])
        )
    return f'<g transform="translate({offset},0)">\n' + "\n".join(drawn) + "\n</g>"


def _axes(
    corpus: dict[str, Any], fractions: list[float], losses: list[float], across: Scale, down: Scale
) -> list[str]:
    """Return the title, the labelled grid, and a dashed line at AdamW's full-length loss."""
    caption = "million training tokens per run (each point is a whole run)"
    drawn = [
        _text(WIDTH / 2, 20, corpus["title"], "middle"),
        _text(WIDTH / 2, HEIGHT - 8, caption, "middle"),
    ]
    for fraction in fractions:
        x = across(math.log(fraction))
        drawn += [
            _line(x, TOP, x, HEIGHT - BOTTOM, GREY, 'stroke-opacity="0.25"'),
            _text(x, HEIGHT - BOTTOM + 16, f"{corpus['tokens'] * fraction / 1e6:.2f}", "middle"),
        ]
    for number in range(5):
        loss = min(losses) + number / 4 * (max(losses) - min(losses))
        drawn += [
            _line(LEFT, down(loss), WIDTH - RIGHT, down(loss), GREY, 'stroke-opacity="0.25"'),
            _text(LEFT - 6, down(loss) + 4, f"{loss:.2f}", "end"),
        ]
    y = down(
        next(
            statistics.mean(point["val_losses"])
            for point in corpus["curves"]["adamw"]
            if point["fraction"] == 1.0
        )
    )
    dashed = 'stroke-dasharray="5 4"'
    return [*drawn, _line(LEFT, y, WIDTH - RIGHT, y, COLOURS["adamw"], dashed)]


def _curve(curve: list[dict[str, Any]], across: Scale, down: Scale, colour: str) -> list[str]:
    """Return a line through the means and a dot for each run."""
    line, dots = [], []
    for point in curve:
        x = f"{across(math.log(point['fraction'])):.1f}"
        line.append(f"{x},{down(statistics.mean(point['val_losses'])):.1f}")
        dots += [
            f'<circle cx="{x}" cy="{down(loss):.1f}" r="3" fill="{colour}" fill-opacity="0.6"/>'
            for loss in point["val_losses"]
        ]
    points = " ".join(line)
    style = f'fill="none" stroke="{colour}" stroke-width="2"'
    return [f'<polyline points="{points}" {style}/>', *dots]


def _scale(low: float, high: float, first: float, last: float) -> Scale:
    return lambda value: first + (value - low) / ((high - low) or 1.0) * (last - first)


def _text(x: float, y: float, text: str, anchor: str, colour: str = GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, style: str) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {style}/>'
    )


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/optimisers.py; run: python benchmarks/optimisers.py --help"
    )
