"""Validation loss against wall time on the characters of Shakespeare, on a CPU, against nanoGPT.

    python benchmarks/shakespeare_cpu.py --text shakespeare.txt --nanogpt path/to/nanoGPT

Trains the recipe `shakespeare-char` unchanged and again with few steps, alternating in fresh
processes, and with `--nanogpt` that project's own recipe for a CPU (its README, "I only have a
macbook"). Time counts from the start of the process and includes importing, building, training,
each evaluation and saving. flatout scores the whole validation split, the last tenth of the
characters; nanoGPT its own estimate of it. Writes benchmarks/results/shakespeare_cpu.json, .md and
.svg.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from charts import Curve, beside, chart
from main_job import prepared, text_parser
from measurement import facts, flatout, in_turns, json_lines, markdown, publish, spread

TARGETS = ((22.0, 1.88), (68.0, 1.60))
"""(wall seconds, validation loss): the loss to reach within that time."""
NANOGPT_OPTIONS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=50 --block_size=64 --batch_size=12"
    " --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
HIGH = 2.6
"""The loss at the top of the picture."""
COLOURS = {"flatout": "#3d7dd1", "flatout, few steps": "#3a9d6e", "nanoGPT": "#d98324"}


def main() -> None:
    made = text_parser(__doc__, repeats=5)
    made.add_argument("--nanogpt", type=Path, help="folder with nanoGPT, to compare with")
    made.add_argument("--few-steps", type=int, default=150, help="steps of the short run")
    given = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(Path(folder), given)
    found = {**facts(), "repeats": given.repeats, "few_steps": given.few_steps, "runs": runs}
    publish(given.out, "shakespeare_cpu", found, table(found))
    (given.out / "shakespeare_cpu.svg").write_text(picture(found))


def measure(folder: Path, given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return every curve of every repeat; each repeat has a seed of its own."""
    data = prepared(folder / "data", given.text)
    few = (f"train.steps={given.few_steps}", "train.eval_every=0")
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(given.repeats):
        run, key = folder / f"run-{seed}", f"train.seed={seed}"
        ways = {
            "flatout": partial(train, run / "whole", data, key),
            "flatout, few steps": partial(train, run / "few", data, key, *few),
        }
        if given.nanogpt:
            ways["nanoGPT"] = partial(
                nanogpt, given.nanogpt, run / "nanogpt", given.text, seed=1337 + seed
            )
        for name, rows in in_turns(ways, 1).items():
            runs.setdefault(name, []).extend(rows)
    return runs


def train(run: Path, data: Path, *overrides: str) -> dict[str, Any]:
    """Train the recipe; return its validation losses by seconds since the process started."""
    began = time.time()
    summary = flatout(
        "train", "shakespeare-char", f"data.path={data}", *overrides, "--run-dir", run
    )
    start = json_lines(run / "events.jsonl")[0]
    # the clock of metrics.jsonl starts when the run is built
    before_s = start["time"] - start["wall_s"] - began
    records = json_lines(run / "metrics.jsonl")
    curve = [
        (before_s + record["wall_s"], record["val/loss"])
        for record in records
        if "val/loss" in record
    ]
    return {
        "wall_s": summary["process_s"],
        "val_loss": summary["val_loss"],
        "tokens": summary["tokens"],
        "before_s": before_s,
        "curve": curve,
    }


def nanogpt(source: Path, folder: Path, text: Path, *, seed: int) -> dict[str, Any]:
    """Train nanoGPT's recipe in a copy of its folder; return the validation losses by seconds."""
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


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = []
    for name, runs in found["runs"].items():
        losses = spread((run["val_loss"] for run in runs), 3)
        cells = [losses, spread((run["wall_s"] for run in runs), 1)]
        cells.append(f"{runs[0]['tokens'] / 1e6:.2f} M")
        for _, loss in TARGETS:
            times = [reached_s(run["curve"], loss) for run in runs]
            cells.append(spread(filter(None, times), 1) if all(times) else "not reached")
        lines.append((name, *cells))
    wanted = " and ".join(f"{loss:g} within {second:g} s" for second, loss in TARGETS)
    return markdown(
        "| validation loss at the end | whole process, s | tokens | "
        + " | ".join(f"{loss:g} reached after, s" for _, loss in TARGETS),
        lines,
        f"Targets: {wanted}. {found['machine']}; {found['repeats']} repeats (seeds),"
        " alternating in fresh processes, median (smallest to largest); seconds count from the"
        " start of the process, evaluations included; flatout scores the whole validation"
        f" split, nanoGPT a sample of it; commit {found['commit']}; `python"
        " benchmarks/shakespeare_cpu.py`.",
    )


def picture(found: dict[str, Any]) -> str:
    """Return loss against wall seconds as SVG; each repeat is a line, each evaluation a dot."""
    curves = []
    for name, runs in found["runs"].items():
        lines = [[(second, min(loss, HIGH)) for second, loss in run["curve"]] for run in runs]
        curves.append(Curve(name, COLOURS[name], lines, [dot for line in lines for dot in line]))
    last = max(second for curve in curves for second, _ in curve.dots)
    drawn = chart(
        "validation loss, nats per character",
        "seconds since the process started; crosses are targets",
        curves,
        across={second: str(second) for second in range(0, int(last) + 1, 10)},
        down={tenth / 10: f"{tenth / 10:.1f}" for tenth in range(14, 27, 2)},
        crosses=TARGETS,
    )
    return beside([drawn])


if __name__ == "__main__":
    main()
