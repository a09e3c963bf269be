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

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diagnose_loop import ROWS, TOKENS, Loop
from measurement import facts, markdown, parser, publish, ratios, spread

import flatout
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
    given = parser(__doc__, minutes=6.0, steps=10).parse_args()
    found = cost(60 * given.minutes, given.steps) | facts()
    publish(given.out, "watch_cost", found, table(found))


def cost(seconds: float, steps: int) -> dict[str, Any]:
    """Return the seconds of each pair of blocks and of the first steps, for at least one round."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {name: [] for name in ("pairs", "noise", "first", "alone")}
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
                    continue
                times = {way: way(loop, steps, watch) for way in rng.sample(WAYS, 2)}
                found["pairs"].append([times[way] for way in WAYS])
            found["alone"].append(alone(watch))
            watch._loop.close()
            print(f"{len(found['pairs'])} pairs: {share(found['pairs'])}", flush=True)
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
    sampler = watch._loop.windows.sampler if watch is not None else None
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
        watch._loop.windows.sampler._look(0.0)
    return {"hooks_s": hooks_s, "sample_s": (time.thread_time() - start_s) / SAMPLES}


def wait_for(loop: Loop) -> None:
    """Wait until the device has done the steps."""
    if loop.device == "cuda":
        torch.cuda.synchronize()


WAYS = (watched, unwatched)


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95% confidence interval, by resampling with a fixed seed."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return statistics.median(values), medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def share(pairs: list[list[float]]) -> str:
    """Return how much longer the first of each pair takes: the median with its interval."""
    found = median_with_interval(ratios(*zip(*pairs, strict=True)))
    middle, low, high = (100 * (value - 1) for value in found)
    return f"{middle:+.2f}% ({low:+.2f} to {high:+.2f}%)"


def decided(pairs: list[list[float]], target: float) -> str:
    """Return whether a cost is below its target, if its whole interval is on one side."""
    _, low, high = median_with_interval(ratios(*zip(*pairs, strict=True)))
    return "kept" if high - 1 < target else "missed" if low - 1 > target else "not decided"


def table(found: dict[str, Any]) -> str:
    """Return the cost as Markdown."""
    steps, pairs = found["steps"], found["pairs"]
    plain_s = [plain_s / steps for _, plain_s in pairs]
    once = [first_s - statistics.median(plain_s) * FIRST for first_s in found["first"]]
    answer = decided(pairs, TARGET) if len(pairs) >= MIN_PAIRS else "not decided"
    return markdown(
        "what | median (95% interval)",
        [
            ("watched steps against unwatched ones", share(pairs)),
            ("unwatched steps against unwatched ones (noise)", share(found["noise"])),
        ],
        f"Target: watching takes less than {TARGET:.0%} of a step: **{answer}**. A step "
        f"takes {spread((1e3 * each for each in plain_s), 1)} ms; the first "
        f"{FIRST} steps of a watch, some of which are recorded, take "
        f"{spread(once, 2)} s more, once.",
        f"By itself, a watched step without work takes "
        f"{spread(1e6 * one['hooks_s'] for one in found['alone'])} us, and a sample "
        f"{spread((1e3 * one['sample_s'] for one in found['alone']), 2)} ms: one every "
        f"{1e3 * SAMPLED_EVERY_S:.0f} ms at first, every {1e3 * LONGEST_INTERVAL_S:.0f} ms "
        "after a minute.",
        "",
        f"{found['machine']}, on {found['device']}; {len(pairs)} pairs of blocks of "
        f"{steps} steps; commit {found['commit']}; `python benchmarks/watch_cost.py`.",
    )


if __name__ == "__main__":
    main()
