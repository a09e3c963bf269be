"""What watching a loop costs, measured by leaving it out.

    python benchmarks/watch_cost.py

The loop of `diagnose_loop.py`, healthy and in one process. Short blocks of steps alternate, watched
and not watched, in random order within each pair, so that a machine that becomes slower or faster
does not count; pairs of two unwatched blocks show the noise. The sampler does nothing during
unwatched blocks. Each round starts a new watch, whose first steps, some of which are recorded, are
a block of their own and are paid once. Ends after `--minutes`. Run it on a quiet machine. Writes
benchmarks/results/watch_cost.json and .md.
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
from flatout.measure.steps.lines import LONGEST_INTERVAL_S
from flatout.measure.watch.loop import SAMPLED_EVERY_S
from flatout.measure.watch.watch import Watch

TARGET = 0.01
"""Largest share of a step that watching may take."""
FIRST = 50
"""First steps of a watch: the warm-up and those that are recorded."""
PAIRS = 40
"""Pairs of blocks in a round."""
NOISE_EVERY = 4
"""Every fourth pair has two unwatched blocks."""
EMPTY_STEPS, SAMPLES = 1_000, 100
"""Steps without work, and looks of the sampler, that are timed by themselves."""
MIN_PAIRS = 50
"""With fewer pairs the interval says nothing."""
RESAMPLES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=10, help="per block")
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
    """Return the seconds of each pair of blocks and of the first steps, for at least one round."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict = {
        "pairs": [],
        "noise": [],
        "first": [],
        "alone": [],
        "steps": steps,
        "device": device,
    }
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(device, Path(folder))
        unwatched(loop, FIRST)
        end_s = time.monotonic() + seconds
        while not found["first"] or time.monotonic() < end_s:
            watch = flatout.watch(model=loop.model, tokens_per_step=ROWS * TOKENS)
            found["first"].append(watched(loop, FIRST, watch))
            for number in range(PAIRS):
                if number % NOISE_EVERY == 0:
                    found["noise"].append([unwatched(loop, steps, watch) for _ in range(2)])
                elif rng.random() < 0.5:
                    found["pairs"].append(
                        [watched(loop, steps, watch), unwatched(loop, steps, watch)]
                    )
                else:
                    plain_s = unwatched(loop, steps, watch)
                    found["pairs"].append([watched(loop, steps, watch), plain_s])
            found["alone"].append(alone(watch))
            watch._loop.close()
            print(f"{len(found['pairs'])} pairs: {share(ratios(found['pairs']))}", flush=True)
    return found | {"steps": steps, "device": device}


def watched(loop: Loop, steps: int, watch: Watch) -> float:
    """Return the seconds of a block of watched steps."""
    start_s = time.perf_counter()
    for batch in watch(loop.batches(steps)):
        with watch.step():
            watch.log(loss=loop.step(batch))
    wait_for(loop)
    return time.perf_counter() - start_s


def unwatched(loop: Loop, steps: int, watch: Watch | None = None) -> float:
    """Return the seconds of a block of steps outside of `watch`, whose sampler pauses."""
    sampler = watch._loop._parts[1].sampler if watch is not None else None
    if sampler is not None:
        sampler._look = lambda seconds: None
    start_s = time.perf_counter()
    for batch in loop.batches(steps):
        loop.step(batch)
    wait_for(loop)
    spent_s = time.perf_counter() - start_s
    if sampler is not None:
        del sampler._look
    return spent_s


def alone(watch: Watch) -> dict[str, float]:
    """Return the seconds of this thread that a watched step without work and a sample take."""
    start_s = time.thread_time()
    for _ in watch(range(EMPTY_STEPS)):
        with watch.step():
            pass
    hooks_s = (time.thread_time() - start_s) / EMPTY_STEPS
    start_s = time.thread_time()
    for _ in range(SAMPLES):
        watch._loop._parts[1].sampler._look(0.0)
    return {"hooks_s": hooks_s, "sample_s": (time.thread_time() - start_s) / SAMPLES}


def wait_for(loop: Loop) -> None:
    """Wait until the device has done the steps."""
    if loop.device == "cuda":
        torch.cuda.synchronize()


def ratios(pairs: list[list[float]]) -> list[float]:
    """Return the first block's time over the second's, of each pair."""
    return [first_s / second_s for first_s, second_s in pairs]


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
    steps = found["steps"]
    unwatched_s = [plain_s / steps for _, plain_s in found["pairs"]]
    step_s = statistics.median(unwatched_s)
    measured = ratios(found["pairs"])
    _, low, high = median_with_interval(measured)
    verdict = "kept" if high - 1 < TARGET else "missed" if low - 1 > TARGET else "not decided"
    if len(measured) < MIN_PAIRS:
        verdict = "not decided"
    once = [first_s - step_s * FIRST for first_s in found["first"]]
    return (
        "\n".join(
            [
                "| what | median (95% interval) |",
                "|---|---|",
                f"| watched steps against unwatched ones | {share(measured)} |",
                "| unwatched steps against unwatched ones (noise) | "
                f"{share(ratios(found['noise']))} |",
                "",
                f"Target: watching takes less than {TARGET:.0%} of a step: **{verdict}**. A step "
                f"takes {spread([1e3 * each for each in unwatched_s], 1)} ms; the first "
                f"{FIRST} steps of a watch, some of which are recorded, take "
                f"{spread(once, 2)} s more, once.",
                f"By itself, a watched step without work takes "
                f"{spread([1e6 * one['hooks_s'] for one in found['alone']])} us, and a sample "
                f"{spread([1e3 * one['sample_s'] for one in found['alone']], 2)} ms: one every "
                f"{1e3 * SAMPLED_EVERY_S:.0f} ms at first, every {1e3 * LONGEST_INTERVAL_S:.0f} ms "
                "after a minute.",
                "",
                f"{found['machine']}, on {found['device']}; {len(measured)} pairs of blocks of "
                f"{steps} steps; commit {found['commit']}; `python benchmarks/watch_cost.py`.",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
