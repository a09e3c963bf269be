"""What measuring a training script costs, by leaving it out.

    python benchmarks/script_cost.py

A small loop of its own process, as a user would write it, runs alone and under `diagnose --` in
turns, in random order within each pair; pairs of two unmeasured runs show the noise. It notes the
time of each step and the processor time of all of them, without the first ones, some of which are
recorded and are paid once. The measurement never ends by itself, so that all other steps are
ordinary, measured ones. Ends after `--minutes`. Run it on a quiet machine. Writes
benchmarks/results/script_cost.json and .md.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measurement import facts, markdown, parser, publish, ratios, spread
from watch_cost import decided, share

from flatout.measure.scripts.request import Request
from flatout.measure.trial import run_command

TARGET = 0.02
"""Largest share of a step that the measurement may take."""
FIRST = 60
"""First steps, which do not count."""
NOISE_EVERY = 4
"""Every fourth pair has two unmeasured runs."""
SCRIPT = f"""
import json, statistics, sys, time
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Linear(64, 128), nn.TransformerEncoder(layer, 3), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64, 64))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
times, steps = [], int(sys.argv[1])
while len(times) < steps:
    for (rows,) in loader:
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        if len(times) == {FIRST}:
            used_s = time.process_time()
        if len(times) == steps:
            break
used_s = (time.process_time() - used_s) / (steps - {FIRST})
step_s = statistics.median(b - a for a, b in zip(times[{FIRST}:], times[{FIRST} + 1 :]))
json.dump([step_s, used_s], open(sys.argv[2], "w"))
"""


def main() -> None:
    given = parser(__doc__, minutes=6.0, steps=300).parse_args()
    found = cost(60 * given.minutes, given.steps) | facts()
    publish(given.out, "script_cost", found, table(found))


def cost(seconds: float, steps: int) -> dict[str, Any]:
    """Return (measured, alone) of each pair: median step and processor seconds of a step."""
    found: dict[str, Any] = {name: [] for name in ("pairs", "noise", "used", "used_noise")}
    rng, end_s = random.Random(0), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path, result = Path(folder) / "train.py", Path(folder) / "times.json"
        path.write_text(SCRIPT, encoding="utf-8")
        command = [sys.executable, str(path), str(steps), str(result)]
        number = 0
        while not found["pairs"] or time.monotonic() < end_s:
            is_noise, times = number % NOISE_EVERY == NOISE_EVERY - 1, {}
            for is_first in rng.sample([True, False], 2):
                if is_first and not is_noise:
                    run_command(command, Request(seconds=1e9, to_the_end=True))
                else:
                    subprocess.run(command, check=True)
                times[is_first] = json.loads(result.read_text())
            names = ("noise", "used_noise") if is_noise else ("pairs", "used")
            for at, name in enumerate(names):
                found[name].append([times[True][at], times[False][at]])
            number += 1
            print(f"{len(found['pairs'])} pairs: {share(found['pairs'])}", flush=True)
    return found | {"steps": steps}


def table(found: dict[str, Any]) -> str:
    """Return the cost as Markdown."""
    noise = found["noise"] or [[1.0, 1.0]]
    return markdown(
        "what | median (95% interval)",
        [
            ("median step of a measured script against one alone", share(found["pairs"])),
            ("processor time of a step, measured against alone", share(found["used"])),
            ("median step alone against alone (noise)", share(noise)),
            ("processor time alone against alone (noise)", share(found["used_noise"] or noise)),
        ],
        f"Target: less than {TARGET:.0%} of a step: **{decided(found['pairs'], TARGET)}**. A step "
        f"takes {spread((1e3 * alone for _, alone in found['pairs']), 1)} ms alone; "
        f"{len(ratios(*zip(*found['pairs'], strict=True)))} pairs of runs of {found['steps']} "
        f"steps, without the first {FIRST}.",
        "",
        f"{found['machine']}; commit {found['commit']}; `python benchmarks/script_cost.py`.",
    )


if __name__ == "__main__":
    main()
