"""The ladder of GPT-2 124M from the baseline (8 rows per micro-batch) to the full set of speedups.

It runs `flatout bench` on text that is prepared here.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from main_job import flatout
from throughput_data import text_data
from throughput_entries import TINY_VOCABULARY, VOCABULARY, WORKS, shape

from flatout.files import write_text

TOKENS_PER_STEP = 32_768
"""Fewer tokens than in the recipe: even these take the baseline seconds, 8 rows at a time."""

LEAST_MINUTES = 1.0


def ladder(
    out: Path, scratch: Path, *, minutes: float | None, rounds: int | None, tiny: bool
) -> None:
    """Measure the ladder and write OUT/throughput_ladder.json and .md.

    The dataset is Python's standard library, because the first rung tokenises in the step, which
    would be too cheap with random tokens. Preparing it counts towards the minutes.
    """
    began_s = time.monotonic()
    config = shape(WORKS[0], tiny=tiny)
    data = text_data(
        scratch / "text",
        vocabulary=TINY_VOCABULARY if tiny else VOCABULARY,
        max_bytes=1 << 20 if tiny else None,
    )
    batch = {
        "batch.tokens_per_step": 4 * config.data.seq_len if tiny else TOKENS_PER_STEP,
        "batch.rows_per_device": "auto",
        "batch.accumulate": None,
    }
    recipe, bench = scratch / "gpt2-124m-ladder.yaml", scratch / "bench"
    requested = config.with_values({**batch, "data.path": str(data), "name": "gpt2-124m-ladder"})
    write_text(recipe, json.dumps(requested.to_dict()))  # JSON is YAML
    left = minutes and max(minutes - (time.monotonic() - began_s) / 60, LEAST_MINUTES)
    limits = [
        *(["--minutes", f"{left:.2f}"] if left else []),
        *(["--repeats", str(rounds)] if rounds else []),
    ]
    flatout("bench", str(recipe), "--out", str(bench), *limits)
    found = json.loads((bench / "bench.json").read_text(encoding="utf-8"))
    found["config"]["data"]["path"] = None  # a temporary directory
    write_text(out / "throughput_ladder.json", json.dumps(found, indent=1) + "\n")
    table = re.sub(
        r"^#", "####", (bench / "table.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    write_text(out / "throughput_ladder.md", table)
    print(table)


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
