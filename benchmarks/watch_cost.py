"""What watching a loop costs, measured by leaving it out.

    python benchmarks/watch_cost.py

Blocks of steps of the loop of `diagnose_loop.py`, healthy and in one process: not watched, watched,
not watched. A watched block is compared with the mean of its two neighbours, so that a machine that
becomes slower or faster does not count, and the neighbours with each other, which shows the noise.
The first steps of a watch, which are recorded, are a block of their own and are paid once. Ends
after `--minutes`. Run it on a quiet machine. Writes benchmarks/results/watch_cost.json and .md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from diagnose_loop import ROWS, TOKENS, Loop
from main_job import RESULTS, commit, spread

import flatout
from flatout.hardware import probe
from flatout.measure.watch.watch import Watch

TARGET = 0.01
"""Largest share of a step that watching may take."""
FIRST = 50
"""First steps of a watch: the warm-up and those that are recorded."""
MIN_ROUNDS = 6
"""With fewer rounds the interval says nothing."""
RESAMPLES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=50, help="per block")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = cost(60 * arguments.minutes, arguments.steps) | {
        "machine": probe().describe(),
        "commit": commit(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "watch_cost.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / "watch_cost.md").write_text(table(found))
    print(table(found))


def cost(seconds: float, steps: int) -> dict:
    """Return the seconds of each round's blocks, for at least one round."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(device, Path(folder))
        timed(loop, steps)
        end_s = time.monotonic() + seconds
        while not rounds or time.monotonic() < end_s:
            before_s = timed(loop, steps)
            watch = flatout.watch(model=loop.model, tokens_per_step=ROWS * TOKENS)
            first_s = timed(loop, FIRST, watch)
            watched_s = timed(loop, steps, watch)
            watch._loop.close()
            after_s = timed(loop, steps)
            rounds.append(
                {"before": before_s, "first": first_s, "watched": watched_s, "after": after_s}
            )
            print(f"round {len(rounds)}: {watched_s / (before_s + after_s) * 2:.3f}", flush=True)
    return {"rounds": rounds, "steps": steps, "device": device}


def timed(loop: Loop, steps: int, watch: Watch | None = None) -> float:
    """Return the seconds of a block of steps."""
    start_s = time.perf_counter()
    if watch is None:
        for batch in loop.batches(steps):
            loop.step(batch)
    else:
        for batch in watch(loop.batches(steps)):
            with watch.step():
                watch.log(loss=loop.step(batch))
    if loop.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95% confidence interval, by resampling with a fixed seed."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return statistics.median(values), medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def share(values: list[float]) -> str:
    """Return the median of some ratios, less one, with its interval."""
    middle, low, high = (100 * (value - 1) for value in median_with_interval(values))
    return f"{middle:+.2f}% ({low:+.2f} to {high:+.2f}%)"


def table(found: dict) -> str:
    """Return the cost as Markdown."""
    rounds, steps = found["rounds"], found["steps"]
    unwatched = [(one["before"] + one["after"]) / 2 for one in rounds]
    ratios = [one["watched"] / plain for one, plain in zip(rounds, unwatched, strict=True)]
    once = [
        one["first"] - plain * FIRST / steps for one, plain in zip(rounds, unwatched, strict=True)
    ]
    _, low, high = median_with_interval(ratios)
    verdict = "kept" if high - 1 < TARGET else "missed" if low - 1 > TARGET else "not decided"
    if len(rounds) < MIN_ROUNDS:
        verdict = "not decided"
    return (
        "\n".join(
            [
                "| what | median (95% interval) |",
                "|---|---|",
                f"| watched steps against unwatched ones | {share(ratios)} |",
                "| unwatched steps after against before (noise) | "
                f"{share([one['after'] / one['before'] for one in rounds])} |",
                "",
                f"Target: watching takes less than {TARGET:.0%} of a step: **{verdict}**. A step "
                f"takes {spread([1e3 * each / steps for each in unwatched], 1)} ms; the first "
                f"{FIRST} steps of a watch, some of which are recorded, take "
                f"{spread(once, 2)} s more, once.",
                "",
                f"{found['machine']}, on {found['device']}; {len(rounds)} rounds of blocks of "
                f"{steps} steps; commit {found['commit']}; `python benchmarks/watch_cost.py`.",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
