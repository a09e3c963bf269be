"""What checkpoints cost: the time that the loop waits, the bytes, and the time to resume.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/checkpoints.py --repeats 3

Trains a transformer of 124 million parameters (the shape of GPT-2, 1.5 GB of weights and moments)
on random tokens in a temporary directory, alternating `speedups=auto,-async-checkpoints`,
`auto,+async-checkpoints`, and the latter with `checkpoint.mirror`, and saves every few steps. The
event of each save states how long the loop was blocked and when the checkpoint was complete. The
last save of a run is not counted, since the run waits for it either way. The first save is reported
separately: an asynchronous one uses memory reserved before the first step, and the time of that
reservation has its own column. The wall time of each run is reported too, since the writing thread
uses part of the cores. Figures are medians over all other saves of all repeats; the ratio is that
of the medians per repeat. The share at the default interval divides the blocked time by the 10
minutes between saves. The bytes are those of all files of one checkpoint. To resume, `flatout
train` starts in a new process on a run that was killed after a save; the time ends with the record
of its first step, whose own time is subtracted. The mirror is an S3 server on this machine if moto
and s3fs are installed, else a directory; either takes time from the same cores. Its cost is the
difference in tokens/s of training with and without it, saves aside. A resume from the mirror starts
without the run directory; since moto copies a whole file for every range of it, one from a
directory as mirror is timed too. Nothing is compiled. Writes benchmarks/results/checkpoints.json
and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import yaml
from checkpoint_mirror import empty, mirror
from loader import make_data
from main_job import RESULTS, commit, spread

from flatout.config.schema import RunConfig, load_config
from flatout.files import folder_bytes
from flatout.hardware import probe
from flatout.training.run import run_training
from flatout.training.run_dir.layout import METRICS, read_events
from flatout.training.saving import DEFAULT_MINUTES_BETWEEN_SAVES

SHAPE = {"num_layers": 12, "d_model": 768, "num_heads": 12}
TOKENIZER = "ids:50257"
WAYS = {
    "in the loop": "auto,-compile,-async-checkpoints",
    "beside training": "auto,-compile,+async-checkpoints",
    "beside training, with a mirror": "auto,-compile,+async-checkpoints",
}
LOOP, BESIDE, MIRRORED = WAYS
STATE_BYTES = 12
"""fp32 weights and AdamW's two moments, per parameter."""
LIMITS = {"share": 0.01, "bytes": 0.01, "resume_s": 5.0, "blocked_ms on a GPU": 50.0}
START_LIMIT_S = 600.0
LONG_STEPS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--saves",
        type=int,
        default=4,
        help="counted saves per run, including the first, which is reported apart; at least 2",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=10,
        help="steps between saves; enough for one to complete before the next",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--folder", type=Path, help="where to save: a directory on the disk to measure"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        mirror(Path(folder)) as (url, kind),
    ):
        found = measure(
            Path(folder), url, arguments.repeats, arguments.saves, arguments.every, arguments.device
        )
        found["mirror"] = kind
    found |= {"machine": probe().describe(), "threads": torch.get_num_threads(), "commit": commit()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "checkpoints.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / "checkpoints.md").write_text(table(found))
    print(table(found))


def measure(folder: Path, url: str, repeats: int, saves: int, every: int, device: str) -> dict:
    """Return every save and every resume of every repeat; `url` is that of the mirror."""
    data = make_data(folder / "data", 1 << 20, shards=1, tokenizer_name=TOKENIZER)
    rows: dict[str, list[dict]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in [*WAYS] if repeat % 2 == 0 else [*WAYS][::-1]:
            run = folder / "run"
            config = settings(data, saves, every, device, WAYS[way])
            if way == MIRRORED:
                config = config.with_values({"checkpoint.mirror": url})
            rows[way].append(train(run, config))
            first, *later = rows[way][-1]["blocked_ms"]
            print(
                f"repeat {repeat + 1}, {way}: blocked for {first:,.0f} ms, then"
                f" {statistics.median(later):,.0f} ms per save",
                file=sys.stderr,
            )
            remove(run)
            empty(url)
    longer = {"log.every": 1, "train.steps": LONG_STEPS}  # it does not end before it is killed
    config = settings(data, saves, every, device, WAYS[BESIDE]).with_values(longer)
    resumes = resumed(folder, config, repeats)
    mirrors = {"url": url, "directory": f"file://{folder / 'mirror'}"}
    restores = {
        where: resumed(folder, config.with_values({"checkpoint.mirror": at}), repeats)
        for where, at in mirrors.items()
    }
    return {
        "repeats": repeats,
        "saves": saves,
        "every": every,
        "device": device,
        "rows": rows,
        "resumes": resumes,
        "restores": restores,
    }


def remove(run: Path) -> None:
    """Delete a run, and wait until the disk has: the next one must not pay for it."""
    subprocess.run(["rm", "-r", run], check=True)
    os.sync()


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
    (last,) = (run / "checkpoints").glob("step-*")
    return {
        "blocked_ms": [event["blocked_ms"] for event in saved],
        "seconds": [event["seconds"] for event in saved],
        "reserve_ms": sum(
            1e3 * event["seconds"] for event in events if event["event"] == "reserve"
        ),
        "wall_s": summary["wall_s"],
        "tokens_per_s": last_record(run)["perf/tokens_per_s"],
        "upload_s": [event["seconds"] for event in events if event["event"] == "upload"],
        "parameters": next(event["parameters"] for event in events if event["event"] == "start"),
        "bytes": folder_bytes(last),
        "weights_sha256": summary["weights_sha256"],
    }


def resumed(folder: Path, config: RunConfig, repeats: int) -> list[dict]:
    """Kill a run after its first save, then start it again and again; return the times.

    With a mirror, it is killed after its first upload, and its directory is lost before each start.
    """
    has_mirror = config.checkpoint.mirror is not None
    run, recipe = folder / "killed", folder / "recipe.yaml"
    shutil.rmtree(run, ignore_errors=True)
    if config.checkpoint.mirror is not None:
        empty(config.checkpoint.mirror)
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    command = [sys.executable, "-m", "flatout", "train", recipe, "--run-dir", run]
    saved = config.checkpoint.every_steps or 1
    first = run / "checkpoints" / f"step-{saved}"
    sent = partial(count, run, "upload")
    started_until(command, folder, sent if has_mirror else first.exists)
    rows = []
    for number in range(1, repeats + 1):
        if has_mirror:
            shutil.rmtree(run)
        starts = 1 if has_mirror else number
        record = partial(first_record, run, starts)
        seconds = started_until(command, folder, record)
        step_s = record()["perf/step_ms"] / 1e3
        rows.append({"seconds": seconds - step_s, "step_s": step_s})
        print(f"first step after {seconds - step_s:.2f} s", file=sys.stderr)
    return rows


def count(run: Path, kind: str) -> int:
    """Return how many events of a kind a run has."""
    return sum(event["event"] == kind for event in read_events(run))


def first_record(run: Path, number: int) -> dict | None:
    """Return the first record after the `number`-th resume, or None before it."""
    resumes = [event for event in read_events(run) if event["event"] == "resume"]
    if len(resumes) < number:  # the later records are still those of the killed process
        return None
    step = resumes[-1]["step"]
    return next((record for record in records(run) if record["step"] > step), None)


def records(run: Path) -> list[dict]:
    """Return the records of a run."""
    return [json.loads(line) for line in (run / METRICS).read_text().split("\n")[:-1]]


def last_record(run: Path) -> dict:
    """Return the last record of training."""
    return [record for record in records(run) if "perf/tokens_per_s" in record][-1]


def started_until(command: list, folder: Path, true) -> float:
    """Start a command, kill it once `true()` holds, and return the seconds until then.

    Raises: SystemExit when the command ends, or takes too long.
    """
    with (folder / "log").open("w") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not true():
                if process.poll() is not None or time.perf_counter() - began > START_LIMIT_S:
                    raise SystemExit(f"It did not get there:\n{(folder / 'log').read_text()}")
                time.sleep(0.005)
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()


def table(found: dict) -> str:
    """Return the figures as Markdown.

    Raises: SystemExit when the variants trained different weights.
    """
    rows = found["rows"]
    if len({row["weights_sha256"] for way in rows.values() for row in way}) > 1:
        raise SystemExit(
            "The variants did not train the same weights: a promise is broken, and the times"
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
        reserve, first = [row["reserve_ms"] for row in runs], [row["blocked_ms"][0] for row in runs]
        wall = spread([row["wall_s"] for row in runs], 1)
        lines.append(
            f"| {way} | {spread(reserve)} | {spread(first)} | **{spread(later(runs))}** |"
            f" {spread(later(runs, 'seconds'), 2)} | {wall} |"
        )
    medians = {
        way: [statistics.median(row["blocked_ms"][1:]) for row in runs]
        for way, runs in rows.items()
    }
    less = [
        100 * (1 - beside / loop)
        for loop, beside in zip(medians[LOOP], medians[BESIDE], strict=True)
    ]
    lines += [
        "",
        f"Blocked by {spread(less, 1)}% less.",
        *goals(found),
        (
            f"{found['machine']}, on {found['device']}, {threads_in(found)};"
            f" {found['repeats']} repeats of {found['saves']} saves, {found['every']} steps apart;"
            f" median (smallest to largest); commit {found['commit']};"
            " `python benchmarks/checkpoints.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


def later(runs: list[dict], name: str = "blocked_ms") -> list[float]:
    """Return a figure of every save but the first of each run."""
    return [figure for row in runs for figure in row[name][1:]]


def goals(found: dict) -> list[str]:
    """Return the figures that have a goal, with it, as sentences."""
    first = found["rows"][BESIDE][0]
    blocked_ms = statistics.median(later(found["rows"][BESIDE]))
    share = blocked_ms / (6e4 * DEFAULT_MINUTES_BETWEEN_SAVES)
    per_parameter = first["bytes"] / first["parameters"]
    seconds = [row["seconds"] for row in found["resumes"]]
    beyond = per_parameter / STATE_BYTES - 1
    lines = [
        f"At the default interval of {DEFAULT_MINUTES_BETWEEN_SAVES:.0f} minutes, training waits"
        f" for {100 * share:.3f}% of the time; goal: {under(share, LIMITS['share'], '1%')}.",
        f"A checkpoint of {first['parameters'] / 1e6:,.0f} M parameters has"
        f" {first['bytes'] / 1e9:.2f} GB, {per_parameter:.3f} bytes per parameter,"
        f" {100 * beyond:.2f}% more than weights and moments; goal:"
        f" {under(beyond, LIMITS['bytes'], '1%')}.",
        f"A killed run begins its first step {spread(seconds, 2)} s after its start; goal:"
        f" {under(statistics.median(seconds), LIMITS['resume_s'], '5 s')}.",
    ]
    lines.append(cost_of_mirror(found))
    if found["device"] != "cpu":
        kept = under(blocked_ms, LIMITS["blocked_ms on a GPU"], "50 ms")
        lines.append(f"An asynchronous save blocks the loop for {blocked_ms:.1f} ms; goal: {kept}.")
    return lines


def cost_of_mirror(found: dict) -> str:
    """Return what the mirror costs, as sentences."""
    without, with_it = found["rows"][BESIDE], found["rows"][MIRRORED]
    slower = [
        100 * (1 - mirrored["tokens_per_s"] / plain["tokens_per_s"])
        for plain, mirrored in zip(without, with_it, strict=True)
    ]
    rates = [spread([row["tokens_per_s"] for row in rows], 1) for rows in (without, with_it)]
    uploads = [seconds for row in with_it for seconds in row["upload_s"]]
    restores = {
        where: spread([row["seconds"] for row in rows], 2)
        for where, rows in found["restores"].items()
    }
    return (
        f"With a mirror, {found['mirror']}, training has {rates[1]} tokens/s, and {rates[0]}"
        f" without: {spread(slower, 1)}% less. An upload of {with_it[0]['bytes'] / 1e9:.2f} GB"
        f" takes {spread(uploads, 1)} s beside training. When the run directory is lost, the first"
        f" step begins {restores['url']} s after the start that restores it, and"
        f" {restores['directory']} s with a directory as mirror."
    )


def threads_in(found: dict) -> str:
    """Return the number of threads, in words."""
    return f"{found['threads']} thread{'s' * (found['threads'] != 1)}"


def under(value: float, limit: float, text: str) -> str:
    """Return a goal, and whether it is kept."""
    return f"under {text}: {'kept' if value < limit else '**missed**'}"


if __name__ == "__main__":
    main()
