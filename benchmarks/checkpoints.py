"""How long saves block training, with synchronous and with asynchronous checkpoints.

    OMP_NUM_THREADS=1 python benchmarks/checkpoints.py --repeats 5 [--out DIR]

Trains a transformer of about 57 million parameters (0.7 GB of weights and moments) on random tokens
in a temporary directory, alternating `speedups=auto,-async-checkpoints` and
`auto,+async-checkpoints`, and saves every few steps. The event of each save states how long the
loop was blocked and when the checkpoint was complete. The last save of a run is not counted, since
the run waits for it either way. The first save is reported separately: an asynchronous one uses
memory reserved before the first step, and the time of that reservation has its own column. The wall
time of each run is reported too, since the writing thread uses part of the cores. Figures are
medians over all other saves of all repeats; the ratio is that of the medians per repeat. Prints a
table, and writes checkpoints.json and .md if --out names a directory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from loader import make_data
from main_job import commit, spread

from flatout.config.schema import RunConfig, load_config
from flatout.hardware import probe
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_events

SHAPE = {"num_layers": 8, "d_model": 768, "num_heads": 12}
WAYS = {
    "in the loop": "auto,-compile,-async-checkpoints",
    "beside training": "auto,-compile,+async-checkpoints",
}
LOOP, BESIDE = WAYS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--saves",
        type=int,
        default=4,
        help="counted saves per run, including the first, which is reported apart; at least 2",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=20,
        help="steps between saves; enough for one to complete before the next",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--folder", type=Path, help="where to save: a directory on the disk to measure"
    )
    parser.add_argument("--out", type=Path, help="directory for checkpoints.json and .md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(
            Path(folder), arguments.repeats, arguments.saves, arguments.every, arguments.device
        )
    found |= {"machine": probe().describe(), "threads": torch.get_num_threads(), "commit": commit()}
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "checkpoints.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.out / "checkpoints.md").write_text(table(found))
    print(table(found))


def measure(folder: Path, repeats: int, saves: int, every: int, device: str) -> dict:
    """Return every save of every repeat."""
    data = make_data(folder / "data", 1 << 20, shards=1)
    rows: dict[str, list[dict]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in [*WAYS] if repeat % 2 == 0 else [*WAYS][::-1]:
            rows[way].append(
                train(
                    folder / f"{repeat}-{way[:2]}", settings(data, saves, every, device, WAYS[way])
                )
            )
            first, *later = rows[way][-1]["blocked_ms"]
            print(
                f"repeat {repeat + 1}, {way}: blocked for {first:,.0f} ms, then"
                f" {statistics.median(later):,.0f} ms per save",
                file=sys.stderr,
            )
    return {"repeats": repeats, "saves": saves, "every": every, "device": device, "rows": rows}


def settings(data: Path, saves: int, every: int, device: str, speedups: str) -> RunConfig:
    """Return the settings of a run that saves `saves` times and once more at its end."""
    model = {f"model.{key}": value for key, value in SHAPE.items()}
    short = {
        "data.path": str(data),
        "data.seq_len": 64,
        "batch.tokens_per_step": 128,
        "batch.rows_per_device": 2,
        "log.every": 10**6,
    }
    saving = {
        "checkpoint.every_steps": every,
        "checkpoint.keep": 1,
        "train.steps": every * (saves + 1),
        "train.device": device,
    }
    return load_config().with_values({**model, **short, **saving, "speedups": speedups})


def train(run: Path, config: RunConfig) -> dict:
    """Train once and return the timings of its saves."""
    summary = run_training(config, run)
    events = read_events(run)
    saved = [event for event in events if event["event"] == "save"][
        : summary["steps"] // (config.checkpoint.every_steps or 1) - 1
    ]
    size = sum(path.stat().st_size for path in (run / "checkpoints").glob("*/*.safetensors"))
    return {
        "blocked_ms": [event["blocked_ms"] for event in saved],
        "seconds": [event["seconds"] for event in saved],
        "reserve_ms": sum(
            1e3 * event["seconds"] for event in events if event["event"] == "reserve"
        ),
        "wall_s": summary["wall_s"],
        "parameters": next(event["parameters"] for event in events if event["event"] == "start"),
        "gigabytes": size / 1e9,
        "weights_sha256": summary["weights_sha256"],
    }


def table(found: dict) -> str:
    """Return the figures as Markdown.

    Raises: SystemExit when the two variants trained different weights.
    """
    rows = found["rows"]
    if len({row["weights_sha256"] for way in rows.values() for row in way}) > 1:
        raise SystemExit(
            "The two variants did not train the same weights: a promise is broken, and the times"
            " mean nothing."
        )
    lines = [
        (
            "| saving | memory reserved before the first step, ms | loop blocked by the first save,"
            " ms | by each later save, ms | complete after, s | run, s |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for way, runs in rows.items():
        blocked, seconds = (
            [figure for row in runs for figure in row[name][1:]]
            for name in ("blocked_ms", "seconds")
        )
        reserve, first = [row["reserve_ms"] for row in runs], [row["blocked_ms"][0] for row in runs]
        wall = spread([row["wall_s"] for row in runs], 1)
        lines.append(
            f"| {way} | {spread(reserve)} | {spread(first)} | **{spread(blocked)}** |"
            f" {spread(seconds, 2)} | {wall} |"
        )
    medians = {
        way: [statistics.median(row["blocked_ms"][1:]) for row in runs]
        for way, runs in rows.items()
    }
    less = [
        100 * (1 - beside / loop)
        for loop, beside in zip(medians[LOOP], medians[BESIDE], strict=True)
    ]
    first = rows[LOOP][0]
    lines += [
        "",
        (
            f"Blocked by {spread(less, 1)}% less. The state has {first['parameters'] / 1e6:,.0f} M"
            f" parameters and {first['gigabytes']:.2f} GB. {found['machine']}, on"
            f" {found['device']}, {found['threads']} threads; {found['repeats']} repeats of"
            f" {found['saves']} saves, {found['every']} steps apart; median (smallest to largest);"
            f" commit {found['commit']}; `python benchmarks/checkpoints.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
