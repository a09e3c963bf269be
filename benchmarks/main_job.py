"""The main job with and without speedups: the table at the top of README.md.

    python benchmarks/main_job.py --text shakespeare.txt --repeats 5

In each repeat, prepares the text (characters, the last tenth for validation) and trains the recipe
`shakespeare-char` with `speedups=none` and with the defaults, alternating in fresh processes.
Writes benchmarks/results/main_job.json and .md. The baseline is fp32 and eager, with an optimizer
that loops over parameters, text tokenised in the step, and a typical micro-batch: the most rows up
to 12 that divide the step. Rates are medians over the repeats, with minimum and maximum. Losses are
compared over the same steps on the same sequences: both runs have the same number of steps there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flatout.config.schema import load_config
from flatout.hardware import probe
from flatout.measure.experiments.results import commit_of_package

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PATHS = ("run", "path", "resumed_from", "by_dataset")
"""Fields that contain temporary directories."""


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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps of both runs")
    parser.add_argument(
        "--long-steps",
        type=int,
        default=300,
        help="steps of the run that gives the steady rate with speedups",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder), arguments.text, arguments.repeats, arguments.steps, arguments.long_steps
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "main_job.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "main_job.md").write_text(table(found))
    print(table(found))


def measure(folder: Path, text: Path, repeats: int, steps: int, long_steps: int) -> dict:
    """Return every figure of every repeat."""
    rows: dict[str, list[dict]] = {
        "prepare": [],
        "baseline": [],
        "flatout": [],
        "flatout, long": [],
    }
    for repeat in range(repeats):
        data = folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        rows["prepare"].append(
            flatout(
                "prepare",
                "shakespeare",
                "--from",
                str(text),
                "--tokenizer",
                "char",
                "--out",
                str(data),
            )
        )
        for name, count, speedups in (
            ("baseline", steps, "none"),
            ("flatout", steps, "auto"),
            ("flatout, long", long_steps, "auto"),
        ):
            run = folder / f"{name}-{repeat}"
            rows[name].append(train(run, data, count, speedups))
            print(
                f"repeat {repeat + 1}: {name}: {rows[name][-1]['tokens_per_s']:,.0f} tokens/s",
                file=sys.stderr,
            )
    return {
        "machine": probe().describe(),
        "commit": commit(),
        "repeats": repeats,
        "steps": steps,
        "long_steps": long_steps,
        "rows": rows,
    }


def train(run: Path, data: Path, steps: int, speedups: str) -> dict:
    """Train in a fresh process; return its --json, the loss of every step, and the micro-batch."""
    words = [
        "train",
        "shakespeare-char",
        f"data.path={data}",
        f"train.steps={steps}",
        f"speedups={speedups}",
        "train.eval_every=0",
        "log.every=1",
    ]
    found = flatout(*words, "--run-dir", str(run))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["losses"] = [record["train/loss"] for record in records if "train/loss" in record]
    batch = load_config(str(run / "config.yaml")).batch
    found["rows_per_device"], found["accumulate"] = batch.rows_per_device, batch.accumulate
    return found


def flatout(*words: str) -> dict:
    """Run a command; return its --json and the seconds of the whole process."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *words, "--json"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    figures = {
        name: value
        for name, value in json.loads(done.stdout.splitlines()[-1]).items()
        if name not in PATHS
    }
    return {**figures, "process_s": time.perf_counter() - began}


def commit() -> str:
    """Return the short commit hash, with + if the package has changed, or "unknown" without git."""
    return commit_of_package() or "unknown"


def spread(values: list[float], digits: int = 0) -> str:
    """Return the median, with minimum and maximum in brackets."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def batch_of(row: dict) -> str:
    """Return a run's micro-batch and accumulation count."""
    return f"{row['rows_per_device']} x {row['accumulate']}"


def table(found: dict) -> str:
    """Return the figures as Markdown."""
    rows = found["rows"]
    plain, fast = rows["baseline"], rows["flatout"]
    plain_rate, fast_rate = (
        spread([row["tokens_per_s"] for row in rows[name]])
        for name in ("baseline", "flatout, long")
    )
    ratio = [
        new["tokens_per_s"] / old["tokens_per_s"]
        for new, old in zip(rows["flatout, long"], plain, strict=True)
    ]
    apart = max(
        abs(a - b) / b
        for new, old in zip(fast, plain, strict=True)
        for a, b in zip(new["losses"], old["losses"], strict=True)
    )
    plain_mfu, mfu = (
        [row["mfu"] * 100 for row in rows[name] if row["mfu"]]
        for name in ("baseline", "flatout, long")
    )
    lines = [
        "| characters of Shakespeare, the same model and sequences "
        "| baseline (`speedups=none`) | `flatout train` |",
        "|---|---|---|",
        f"| micro-batch: rows x accumulations | {batch_of(plain[0])} | {batch_of(fast[0])} |",
        f"| steady tokens/s | {plain_rate} | {fast_rate} |",
        f"| speedup | 1 | **{spread(ratio, 1)}** |",
        "| share of the measured matmul peak, each in its own precision "
        f"| {spread(plain_mfu, 1)}% | {spread(mfu, 1)}% |",
        f"| loss after {found['steps']} steps "
        f"| {plain[0]['losses'][-1]:.4f} | {fast[0]['losses'][-1]:.4f} |",
        "",
        "The baseline is fp32 and eager, with an optimizer that loops over parameters, text "
        "tokenised in the step, and the most rows up to 12 that divide the step. "
        f"{found['machine']}; {found['repeats']} repeats, alternating in fresh processes; median "
        f"(smallest to largest) over {found['steps']} steps of the baseline and "
        f"{found['long_steps']} of `flatout train`; the losses of all {found['steps']} steps agree "
        f"to {apart:.0e}; commit {found['commit']}; `python benchmarks/main_job.py`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
