"""What following a training loop costs: alternating blocks of steps in one process.

    python benchmarks/hook.py

A block of followed steps is one of ordinary steps, after the stages of a measurement that record
calls, as in `flatout diagnose --to-the-end`. Between two of them is a block without. Each block is
followed afresh, and all hooks are removed at its end. The ratio is that of the medians of a pair of
blocks. Writes benchmarks/results/hook.json and .md. It takes four minutes.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from measurement import facts, markdown, parser, publish, spread, verdict
from torch import nn

from flatout.measure.attach.follower import Follower
from flatout.measure.attach.stages import Stages

STEPS = 30
"""Steps of a block."""
TARGET = 1.02
CASES = {"10 modules": (2, 320), "50 modules": (12, 96)}
"""Blocks of a model and their width, for steps of about 20 ms on one core."""


def loop(depth: int, width: int) -> Any:
    """Return a function that takes a step of an ordinary training loop."""
    layers = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))]
    layers += [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
        for _ in range(depth - 1)
    ]
    model = nn.Sequential(nn.Embedding(256, width), *layers, nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (16, 33))

    def step() -> None:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def block(step: Any) -> float:
    """Return the median seconds of a block of steps."""
    ends_s = [time.perf_counter()]
    for _ in range(STEPS):
        step()
        ends_s.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(ends_s))


def followed(step: Any) -> float:
    """Return the median seconds of a block of ordinary steps that are followed."""
    late: list[bool] = []

    def is_enough(_: Stages) -> bool:
        late.append(True)
        return False

    follower = Follower("script", at_exit=lambda: None, is_enough=is_enough, recorded_steps=0)
    try:
        while not late:
            step()
        return block(step)
    finally:
        follower.close()


def main() -> None:
    given = parser(__doc__, repeats=30).parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (depth, width) in CASES.items():
        step, pairs = loop(depth, width), []
        block(step)
        for number in range(given.repeats):
            ways = [followed, block] if number % 2 else [block, followed]
            times = {way: way(step) for way in ways}
            pairs.append((times[followed], times[block]))
        ratios = [with_s / plain_s for with_s, plain_s in pairs]
        plain_ms = 1e3 * statistics.median(plain_s for _, plain_s in pairs)
        rows.append({"model": name, "plain_ms": plain_ms, "ratios": ratios})
    found = {**facts(), "steps": STEPS, "rows": rows}
    publish(given.out, "hook", found, table(found))


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    cells = [
        [
            row["model"],
            f"{row['plain_ms']:.1f} ms",
            spread(row["ratios"], 3),
            verdict(statistics.median(row["ratios"]) <= TARGET),
        ]
        for row in found["rows"]
    ]
    return markdown(f"model | step | followed / plain | at most {TARGET}", cells)


if __name__ == "__main__":
    main()
