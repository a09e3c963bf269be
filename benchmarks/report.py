"""The time that `flatout report` takes, and the size of its page.

    python benchmarks/report.py --repeats 5

Writes run directories with the metrics that training on a GPU records, and reports them, each time
in a fresh process: the time includes starting Python and loading Bokeh. Writes
benchmarks/results/report.json and .md. Takes about a minute.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from measurement import facts, flatout, in_turns, markdown, parser, publish, spread, verdict

CASES = ((1, 1_000), (1, 100_000), (4, 25_000))
"""Runs, and records of each."""
MAX_S, MAX_MB = 5.0, 6.0
"""Targets for a run of 100,000 records."""
EVENTS_EVERY = 50
"""A save after so many records; a skipped step as often."""


def main() -> None:
    given = parser(__doc__, repeats=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(Path(folder), *case, given.repeats) for case in CASES]
    found = {**facts(), "repeats": given.repeats, "rows": rows}
    publish(given.out, "report", found, table(found))


def measure(folder: Path, num_runs: int, records: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of each repeat, and the size of the page."""
    runs = [write_run(folder / f"{records}-{one}", records, seed=one) for one in range(num_runs)]
    out = folder / "report.html"
    report = partial(flatout, "report", *runs, "--out", out)
    # the first round fills the disk's cache
    (rounds,) = in_turns({f"{num_runs} x {records}": report}, repeats, warm_up=1).values()
    seconds = [found["process_s"] for found in rounds]
    return {"runs": num_runs, "records": records, "seconds": seconds, "bytes": out.stat().st_size}


def write_run(folder: Path, records: int, *, seed: int) -> Path:
    """Write a run directory with every metric that a run on a GPU records."""
    draw = random.Random(seed)
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"name: long\ntrain: {{steps: {records}, seed: {seed}}}\ndata: {{path: data/book}}\n"
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, records + 1):
            file.write(json.dumps(record(step, records, draw)) + "\n")
    with (folder / "events.jsonl").open("w") as file:
        for step in range(EVENTS_EVERY, records, EVENTS_EVERY):
            path = f"checkpoints/step-{step}"
            file.write(json.dumps({"event": "save", "step": step, "path": path}) + "\n")
            file.write(json.dumps({"event": "skip", "step": step, "reason": "overflow"}) + "\n")
    return folder


def record(step: int, steps: int, draw: random.Random) -> dict:
    """Return one line of metrics.jsonl, with noise as a run has it."""
    step_ms = draw.gauss(300, 9)
    figures = {
        "step": step,
        "tokens": step * 524_288,
        "wall_s": 0.3 * step,
        "elapsed_s": 0.3 * step,
        "train/loss": 3 + 7 * math.exp(-8 * step / steps) + draw.gauss(0, 0.05),
        "train/grad_norm": abs(draw.gauss(1, 0.2)),
        "train/lr": 1e-3 * (1 - step / steps),
        "train/epoch": step / steps,
        "perf/tokens_per_s": 524_288e3 / step_ms,
        "perf/samples_per_s": 512e3 / step_ms,
        "perf/steps_per_s": 1e3 / step_ms,
        "perf/mfu": 150 / step_ms,
        "perf/step_ms": step_ms,
        "perf/data_wait_ms": abs(draw.gauss(0, 2)),
        "perf/host_ms": draw.gauss(30, 3),
        "perf/device_ms": 0.98 * step_ms,
        "mem/allocated_gib": 40.0,
        "mem/peak_gib": 60.0,
        "mem/reserved_gib": 62.0,
        "gpu/util_pct": draw.uniform(95, 100),
        "gpu/power_w": draw.gauss(640, 10),
    }
    return figures | ({"val/loss": figures["train/loss"] + 0.1} if step % 100 == 0 else {})


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    longest = max(found["rows"], key=lambda row: row["records"])
    is_kept = statistics.median(longest["seconds"]) < MAX_S and longest["bytes"] < 1e6 * MAX_MB
    return markdown(
        "runs | records of each | seconds | MB",
        [
            (
                *(row["runs"], f"{row['records']:,}", spread(row["seconds"], 1)),
                f"{row['bytes'] / 1e6:.1f}",
            )
            for row in found["rows"]
        ],
        f"Target for one run of 100,000 records: under {MAX_S:.0f} s and {MAX_MB:.0f} MB:"
        f" {verdict(is_kept)}. {found['machine']}; made-up records with every figure of a run on a"
        f" GPU; a fresh process each time; {found['repeats']} repeats; median (smallest to"
        f" largest); commit {found['commit']}; `python benchmarks/report.py`.",
    )


if __name__ == "__main__":
    main()
