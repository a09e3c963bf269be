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
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from main_job import RESULTS, commit, flatout, spread

from flatout.hardware import probe

TARGETS = ((22.0, 1.88), (68.0, 1.60))
"""(wall seconds, validation loss): the loss to reach within that time."""
NANOGPT_OPTIONS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=50 --block_size=64 --batch_size=12"
    " --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 60, 30, 20, 50
LOW, HIGH = 1.4, 2.6
"""Losses at the bottom and the top of the picture."""
TARGET_COLOUR = "#dc3c3c"
COLOURS = {"flatout": "#3d7dd1", "flatout, few steps": "#3a9d6e", "nanoGPT": "#d98324"}
GREY = "#757b86"
"""Colour of text and grid; like the others, it is readable on light and dark pages."""


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
    parser.add_argument("--nanogpt", type=Path, help="folder with nanoGPT, to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--nanogpt-repeats", type=int, default=5, help="repeats that also run nanoGPT"
    )
    parser.add_argument("--few-steps", type=int, default=150, help="steps of the short run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "shakespeare_cpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "shakespeare_cpu.md").write_text(table(found))
    (RESULTS / "shakespeare_cpu.svg").write_text(picture(found))
    print(table(found))


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return every curve of every repeat."""
    data = folder / "data"
    flatout(
        "prepare",
        "shakespeare",
        "--from",
        str(arguments.text),
        "--tokenizer",
        "char",
        "--out",
        str(data),
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(arguments.repeats):
        for name, more in (
            ("flatout", []),
            ("flatout, few steps", [f"train.steps={arguments.few_steps}", "train.eval_every=0"]),
        ):
            runs.setdefault(name, []).append(
                train(folder / f"{name}-{repeat}", data, f"train.seed={repeat}", *more)
            )
        if arguments.nanogpt and repeat < arguments.nanogpt_repeats:
            runs.setdefault("nanoGPT", []).append(
                nanogpt(
                    arguments.nanogpt,
                    folder / f"nanogpt-{repeat}",
                    arguments.text,
                    seed=1337 + repeat,
                )
            )
        for name, repeats in runs.items():  # prints nanoGPT's last run after its last repeat
            print(
                f"repeat {repeat + 1}: {name}: loss {repeats[-1]['val_loss']:.4f} in"
                f" {repeats[-1]['wall_s']:.1f} s",
                file=sys.stderr,
            )
    return {
        "machine": probe().describe(),
        "commit": commit(),
        "repeats": arguments.repeats,
        "few_steps": arguments.few_steps,
        "runs": runs,
    }


def train(run: Path, data: Path, *overrides: str) -> dict[str, Any]:
    """Train the recipe; return its validation losses by seconds since the process started."""
    began = time.time()
    summary = flatout(
        "train", "shakespeare-char", f"data.path={data}", *overrides, "--run-dir", str(run)
    )
    start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    # the clock of metrics.jsonl starts when the run is built
    before_s = start["time"] - start["wall_s"] - began
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
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
    subprocess.run(
        [sys.executable, "data/shakespeare_char/prepare.py"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / "train.py").write_text(
        (folder / "train.py").read_text().replace("manual_seed(1337", f"manual_seed({seed}")
    )
    words = [
        sys.executable,
        "-u",
        "train.py",
        "config/train_shakespeare_char.py",
        *NANOGPT_OPTIONS.split(),
    ]
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
    lines = [
        "| | validation loss at the end | whole process, s | tokens | "
        + " | ".join(f"{loss:g} reached after, s" for _, loss in TARGETS)
        + " |"
    ]
    lines.append("|---|---|---|---|" + "---|" * len(TARGETS))
    for name, repeats in found["runs"].items():
        cells = [
            spread([run["val_loss"] for run in repeats], 3),
            spread([run["wall_s"] for run in repeats], 1),
            f"{repeats[0]['tokens'] / 1e6:.2f} M",
        ]
        for _, loss in TARGETS:
            times = [reached_s(run["curve"], loss) for run in repeats]
            cells.append(
                spread([second for second in times if second], 1) if all(times) else "not reached"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    wanted = " and ".join(f"{loss:g} within {second:g} s" for second, loss in TARGETS)
    lines += [
        "",
        (
            f"Targets: {wanted}. {found['machine']}; {found['repeats']} repeats (seeds),"
            " alternating in fresh processes, median (smallest to largest); seconds count from the"
            " start of the process, evaluations included; flatout scores the whole validation"
            f" split, nanoGPT a sample of it; commit {found['commit']}; `python"
            " benchmarks/shakespeare_cpu.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


def picture(found: dict[str, Any]) -> str:
    """Return loss against wall seconds as SVG, for light and dark pages.

    Each repeat is a line, each evaluation a dot, each target a cross.
    """
    curves = [(name, run["curve"]) for name, repeats in found["runs"].items() for run in repeats]
    last = max([*(second for _, curve in curves for second, _ in curve), *(s for s, _ in TARGETS)])

    def position(second: float, loss: float) -> tuple[float, float]:
        down = (HIGH - min(loss, HIGH)) / (HIGH - LOW)
        return (
            round(LEFT + second / last * (WIDTH - LEFT - RIGHT), 1),
            round(TOP + down * (HEIGHT - TOP - BOTTOM), 1),
        )

    drawn = axes(last, position)
    for name, curve in curves:
        points = [position(second, loss) for second, loss in curve]
        line = " ".join(f"{x},{y}" for x, y in points)
        colour = COLOURS[name]
        drawn.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity="0.6"/>'
        )
        drawn += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in points]
    for x, y in (position(second, loss) for second, loss in TARGETS):
        cross = f"M{x - 6:.1f},{y} h12 M{x},{y - 6:.1f} v12"
        drawn.append(f'<path d="{cross}" stroke="{TARGET_COLOUR}" stroke-width="2"/>')
    legend = [*((name, COLOURS[name]) for name in found["runs"]), ("target", TARGET_COLOUR)]
    drawn += [
        label(WIDTH - RIGHT - 10, TOP + 18 * (number + 1), name, "end", colour)
        for number, (name, colour) in enumerate(legend)
    ]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    return "\n".join([opening, *drawn, "</svg>"]) + "\n"


def axes(last: float, position: Callable[[float, float], tuple[float, float]]) -> list[str]:
    """Return the grid lines and the labels of both axes."""
    drawn: list[str] = []
    for loss in (tenth / 10 for tenth in range(14, 27, 2)):
        x, y = position(0, loss)
        drawn += [
            f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{GREY}" '
            'stroke-opacity="0.3"/>',
            label(LEFT - 8, round(y + 4, 1), f"{loss:.1f}", "end"),
        ]
    drawn += [
        label(position(second, LOW)[0], HEIGHT - BOTTOM + 18, str(second), "middle")
        for second in range(0, int(last) + 1, 10)
    ]
    return [
        *drawn,
        label(WIDTH / 2, HEIGHT - 10, "seconds since the process started", "middle"),
        label(LEFT, 18, "validation loss, nats per character", "start"),
    ]


def label(x: float, y: float, text: str, anchor: str, colour: str = GREY) -> str:
    """Return a text element."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    main()
