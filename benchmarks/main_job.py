"""The main job with and without speedups: the table at the top of README.md.

    python benchmarks/main_job.py --text shakespeare.txt --repeats 5

In each repeat, prepares the text (characters, the last tenth for validation) and trains the recipe
`shakespeare-char` with `speedups=none` and with the defaults, alternating in fresh processes.
Writes benchmarks/results/main_job.json and .md. The baseline is fp32 and eager, with an optimizer
that loops over parameters, text tokenised in the step, and a typical micro-batch: the most rows up
to 12 that divide the step. Rates are medians over the repeats, with minimum and maximum. Losses are
compared over the same steps on the same sequences: both runs have `--steps` of them there, and the
steady rate with speedups is that of `--long-steps`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from measurement import (
    facts,
    flatout,
    in_turns,
    json_lines,
    markdown,
    parser,
    publish,
    ratios,
    spread,
)

from flatout.config.schema import load_config


def text_parser(about: str | None, **options: float) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that trains on the characters of Shakespeare."""
    made = parser(about, **options)
    made.add_argument(
        "--text", type=Path, required=True, help="text file named by the dataset card `shakespeare`"
    )
    return made


def main() -> None:
    given = text_parser(__doc__, repeats=5, steps=40, long_steps=300).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), given.text, given.repeats, given.steps, given.long_steps)
    counts = {"repeats": given.repeats, "steps": given.steps, "long_steps": given.long_steps}
    found = {**facts(), **counts, "rows": rows}
    publish(given.out, "main_job", found, table(found))


def prepared(data: Path, text: Path) -> Path:
    """Prepare the text as characters, anew, and return the path of the dataset."""
    shutil.rmtree(data, ignore_errors=True)
    flatout("prepare", "shakespeare", "--from", text, "--tokenizer", "char", "--out", data)
    return data


def measure(folder: Path, text: Path, repeats: int, steps: int, long_steps: int) -> dict[str, Any]:
    """Return every result of every repeat."""
    data = prepared(folder / "data", text)
    ways = {
        "baseline": partial(train, folder / "run", data, steps, "none"),
        "flatout": partial(train, folder / "run", data, steps, "auto"),
        "flatout, long": partial(train, folder / "run", data, long_steps, "auto"),
    }
    return in_turns(ways, repeats)


def train(run: Path, data: Path, steps: int, speedups: str) -> dict[str, Any]:
    """Train in a fresh process; return its --json, the loss of every step, and the micro-batch."""
    shutil.rmtree(run, ignore_errors=True)
    keys = (f"data.path={data}", f"train.steps={steps}", f"speedups={speedups}")
    keys += ("train.eval_every=0", "log.every=1")
    found = flatout("train", "shakespeare-char", *keys, "--run-dir", run)
    records = json_lines(run / "metrics.jsonl")
    found["losses"] = [record["train/loss"] for record in records if "train/loss" in record]
    batch = load_config(str(run / "config.yaml")).batch
    return {**found, "rows_per_device": batch.rows_per_device, "accumulate": batch.accumulate}


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    plain, fast, long = (found["rows"][name] for name in ("baseline", "flatout", "flatout, long"))
    rates = [[row["tokens_per_s"] for row in rows] for rows in (plain, long)]
    mfu = [spread([100 * row["mfu"] for row in rows if row["mfu"]], 1) for rows in (plain, long)]
    batches = [f"{rows[0]['rows_per_device']} x {rows[0]['accumulate']}" for rows in (plain, fast)]
    losses = [f"{rows[0]['losses'][-1]:.4f}" for rows in (plain, fast)]
    apart = max(
        abs(a - b) / b
        for new, old in zip(fast, plain, strict=True)
        for a, b in zip(new["losses"], old["losses"], strict=True)
    )
    peak = "share of the measured matmul peak, each in its own precision"
    return markdown(
        "characters of Shakespeare, the same model and sequences "
        "| baseline (`speedups=none`) | `flatout train`",
        [
            ("micro-batch: rows x accumulations", *batches),
            ("steady tokens/s", *map(spread, rates)),
            ("speedup", 1, f"**{spread(ratios(*reversed(rates)), 1)}**"),
            (peak, *(f"{share}%" for share in mfu)),
            (f"loss after {found['steps']} steps", *losses),
        ],
        "The baseline is fp32 and eager, with an optimizer that loops over parameters, text "
        "tokenised in the step, and the most rows up to 12 that divide the step. "
        f"{found['machine']}; {found['repeats']} repeats, alternating in fresh processes; median "
        f"(smallest to largest) over {found['steps']} steps of the baseline and "
        f"{found['long_steps']} of `flatout train`; the losses of all {found['steps']} steps agree "
        f"to {apart:.0e}; commit {found['commit']}; `python benchmarks/main_job.py`.",
    )


if __name__ == "__main__":
    main()
