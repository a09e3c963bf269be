"""Validation loss against wall time on the characters of Shakespeare, on a CPU, against nanoGPT.

    python benchmarks/shakespeare_cpu.py --text shakespeare.txt --nanogpt path/to/nanoGPT

Trains the recipe `shakespeare-char` unchanged and again with few steps, the recipe
`shakespeare-char-long`, and that project's own recipe for a CPU (its README, "I only have a
macbook"), alternating in fresh processes. Time counts from the start of the process and includes
importing, building, training, each evaluation and saving. Runs of a few compiled steps come
first, so that flatout finds the compiled code in torch's cache, as from a user's second run on.
flatout scores the whole validation
split, the last tenth of the characters; nanoGPT its own estimate of it. Writes
benchmarks/results/shakespeare_cpu.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from charts import GREY, Curve, beside, chart
from measurement import (
    facts,
    flatout,
    in_turns,
    json_lines,
    markdown,
    prepared,
    publish,
    spread,
    text_parser,
    verdict,
)

TARGETS = ((0.07, 1.88), (0.30, 1.60), (0.70, 1.50))
"""(fraction of the seconds of nanoGPT's whole run, validation loss): the loss to reach by then."""
FEW, LONG = "flatout, few steps", "flatout, long"
NANOGPT_OPTIONS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=50 --block_size=64 --batch_size=12"
    " --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
HIGH = 2.4
"""The loss at the top of the picture."""
COLOURS = {"flatout": "#3d7dd1", FEW: "#3d7dd1", LONG: "#3d7dd1", "nanoGPT": "#d98324"}
LABELS = {
    "flatout": (-0.5, -0.06, "middle"),
    FEW: (0.5, 0.03, "start"),
    LONG: (0.0, -0.06, "end"),
    "nanoGPT": (0.0, -0.06, "end"),
}
"""Where a curve's name stands beside its end (seconds, loss), and how it is anchored there."""


def main() -> None:
    made = text_parser(__doc__, repeats=5, first_seed=0, few_steps=120)
    made.add_argument("--nanogpt", type=Path, required=True, help="directory with nanoGPT")
    given = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(Path(folder), given)
    found = {**facts(), "repeats": given.repeats, "few_steps": given.few_steps, "runs": runs}
    publish(given.out, "shakespeare_cpu", found, table(found))
    (given.out / "shakespeare_cpu.svg").write_text(picture(found))


def measure(folder: Path, given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return every curve of every repeat. Each repeat has a seed of its own."""
    data = prepared(folder / "data", given.text)
    few = (f"train.steps={given.few_steps}", "train.eval_every=0")
    runs: dict[str, list[dict[str, Any]]] = {}
    compiled = ("speedups=auto,+compile", "train.steps=8", "train.eval_every=0")
    for recipe in ("shakespeare-char", "shakespeare-char-long"):
        train(folder / f"compiled-{recipe}", recipe, f"data.path={data}", *compiled)
    for seed in range(given.first_seed, given.first_seed + given.repeats):
        run, keys = folder / f"run-{seed}", (f"data.path={data}", f"train.seed={seed}")
        ways = {
            "flatout": partial(train, run / "whole", "shakespeare-char", *keys),
            FEW: partial(train, run / "few", "shakespeare-char", *keys, *few),
            LONG: partial(train, run / "long", "shakespeare-char-long", *keys),
            "nanoGPT": partial(
                nanogpt, given.nanogpt, run / "nanogpt", given.text, seed=1337 + seed
            ),
        }
        for name, rows in in_turns(ways, 1).items():
            runs.setdefault(name, []).extend(rows)
    return runs


def train(run: Path, recipe: str, *overrides: str) -> dict[str, Any]:
    """Train a recipe; return its validation losses by seconds since the process started."""
    began = time.time()
    summary = flatout("train", recipe, *overrides, "--run-dir", run)
    start = json_lines(run / "events.jsonl")[0]
    # the clock of metrics.jsonl starts when the run is built
    before_s = start["time"] - start["wall_s"] - began
    records = json_lines(run / "metrics.jsonl")
    curve = [
        (before_s + record["wall_s"], record["val/loss"])
        for record in records
        if "val/loss" in record
    ]
    if curve and curve[-1][1] != summary["val_loss"]:  # these score a part of the split
        curve = [(summary["process_s"], summary["val_loss"])]
    return {
        "wall_s": summary["process_s"],
        "val_loss": summary["val_loss"],
        "tokens": summary["tokens"],
        "before_s": before_s,
        "curve": curve,
    }


def nanogpt(source: Path, folder: Path, text: Path, *, seed: int) -> dict[str, Any]:
    """Train nanoGPT's recipe in a copy of its directory. Return validation losses by seconds."""
    shutil.copytree(source, folder)
    shutil.copyfile(text, folder / "data" / "shakespeare_char" / "input.txt")
    prepare = [sys.executable, "data/shakespeare_char/prepare.py"]
    subprocess.run(prepare, cwd=folder, check=True, capture_output=True)
    code = (folder / "train.py").read_text()
    (folder / "train.py").write_text(code.replace("manual_seed(1337", f"manual_seed({seed}"))
    words = [sys.executable, "-u", "train.py", "config/train_shakespeare_char.py"]
    words += NANOGPT_OPTIONS.split()
    began = time.time()
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        lines = [(time.time() - began, line) for line in process.stdout or ()]
    if process.returncode:
        raise SystemExit(f"nanoGPT exited with {process.returncode}")
    wall_s = time.time() - began
    evaluations = [
        (second, re.match(r"step \d+: train loss \S+, val loss (\S+)", line))
        for second, line in lines
    ]
    curve = [(second, float(found[1])) for second, found in evaluations if found]
    return {"wall_s": wall_s, "val_loss": curve[-1][1], "tokens": 2000 * 12 * 64, "curve": curve}


def reached_s(curve: list[tuple[float, float]], loss: float) -> float | None:
    """Return when a curve first reaches `loss`."""
    return next((second for second, value in curve if value <= loss), None)


def fractions(found: dict[str, Any], loss: float) -> list[float] | None:
    """Return, per repeat, the first time that flatout reached `loss`, as a share of nanoGPT's run.

    None when a repeat never reached it.
    """
    shares = []
    for number, whole in enumerate(found["runs"]["nanoGPT"]):
        ours = [runs[number] for name, runs in found["runs"].items() if name != "nanoGPT"]
        times = [reached_s(run["curve"], loss) for run in ours]
        shares.append(min(filter(None, times), default=None))
        if shares[-1] is None:
            return None
        shares[-1] /= whole["wall_s"]
    return shares


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = []
    for name, runs in found["runs"].items():
        cells = [spread((run["val_loss"] for run in runs), 3)]
        cells += [spread((run["wall_s"] for run in runs), 1), f"{runs[0]['tokens'] / 1e6:.2f} M"]
        for _, loss in TARGETS:
            times = [reached_s(run["curve"], loss) for run in runs]
            cells.append(spread(filter(None, times), 1) if all(times) else "not reached")
        lines.append((name, *cells))
    goals = []
    for fraction, loss in TARGETS:
        shares = fractions(found, loss)
        shown = spread(shares, 2) if shares else "not reached"
        kept = verdict(bool(shares) and statistics.median(shares) <= fraction)
        goals.append(f"{loss:.2f} after {shown}; target: {fraction:.2f}: {kept}")
    return markdown(
        "| validation loss at the end | whole process, s | tokens | "
        + " | ".join(f"{loss:.2f} reached after, s" for _, loss in TARGETS),
        lines,
        f"As a share of nanoGPT's whole run: {'. '.join(goals)}. {found['machine']};"
        f" {found['repeats']} repeats (seeds), in turns in fresh processes, median (smallest to"
        " largest); seconds count from the start of the process, evaluations included; flatout"
        f" scores the whole validation split, nanoGPT a sample of it; flatout finds compiled"
        " code in torch's cache, as from the second run on; few steps:"
        f" {found['few_steps']}; commit {found['commit']}; `python benchmarks/shakespeare_cpu.py`.",
    )


def picture(found: dict[str, Any]) -> str:
    """Return loss against wall seconds as SVG: medians as lines, each evaluation as a dot."""
    curves, ends = [], {}
    for name, runs in found["runs"].items():
        middle = [
            tuple(map(statistics.median, zip(*points, strict=True)))
            for points in zip(*(run["curve"] for run in runs), strict=True)
        ]
        line = [(second, loss) for second, loss in middle if loss <= HIGH]
        dots = [point for run in runs for point in run["curve"] if point[1] <= HIGH]
        second, loss = ends[name] = line[-1]
        right, above, anchor = LABELS[name]
        shown = f"{name}: {loss:.2f} after {second:.0f} s"
        label = ((second + right, loss + above), anchor)
        curves.append(Curve(shown, COLOURS[name], [line], dots, label))
    (soon_s, loss), (late_s, _) = ends[FEW], ends["nanoGPT"]
    times = f"{late_s / soon_s:.0f} times sooner"
    label = ((0.65 * soon_s + 0.35 * late_s, loss - 0.06), "middle")  # not below nanoGPT's name
    curves.insert(0, Curve(times, GREY, [[ends[FEW], ends["nanoGPT"]]], [], label))
    drawn = chart(
        "Validation loss on the characters of Shakespeare, two CPU cores",
        "seconds since the process started",
        curves,
        across={second: str(second) for second in range(0, int(late_s) + 10, 10)},
        down={tenth / 10: f"{tenth / 10:.1f}" for tenth in range(14, 26, 2)},
    )
    return beside([drawn])


if __name__ == "__main__":
    main()
