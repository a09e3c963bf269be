"""What checkpoints cost: the time that the loop waits, the bytes, and the time to resume.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/checkpoints.py --repeats 3

Trains a transformer of 124 million parameters (the shape of GPT-2, 1.5 GB of weights and moments)
on random tokens, uncompiled, alternating `speedups=auto,-async-checkpoints`,
`auto,+async-checkpoints`, and the latter with `checkpoint.upload`, and saves every few steps. The
event of each save states how long the loop was blocked and when the checkpoint was complete. The
first save is reported separately, the last one, for which the run waits, is not counted. An
asynchronous save uses memory reserved before the first step, a separate column. Results are
medians over all saves. The ratio is that of the medians per repeat. To resume, `flatout train`
starts in a new process on a run that was killed after a save, until the record of its first step,
whose own time is subtracted. Uploads go to an S3 server on this machine if moto and s3fs are
installed, else to a directory. Their cost is the difference in tokens/s, saves aside. A resume from
the remote copy starts without the run directory; since moto copies a whole file for every range of
it, one from a directory is timed too. Writes benchmarks/results/checkpoints.json and .md.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import torch
import yaml
from loader import make_data
from measurement import facts, in_turns, markdown, parser, publish, ratios, spread, verdict

from flatout.config.schema import RunConfig, load_config
from flatout.storage.files import folder_bytes
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_events, read_records
from flatout.training.saving import DEFAULT_MINUTES_BETWEEN_SAVES

SHAPE = {"num_layers": 12, "d_model": 768, "num_heads": 12}
TOKENIZER = "ids:50257"
WAYS = {
    "in the loop": "auto,-compile,-async-checkpoints",
    "beside training": "auto,-compile,+async-checkpoints",
    "beside training, with uploads": "auto,-compile,+async-checkpoints",
}
LOOP, BESIDE, UPLOADED = WAYS
STATE_BYTES = 12
"""fp32 weights and AdamW's two moments, per parameter."""
LIMITS = {"share": 0.01, "bytes": 0.01, "resume_s": 5.0, "blocked_ms on a GPU": 50.0}
START_LIMIT_S, SERVER_LIMIT_S = 600.0, 60.0
S3_SERVER, DIRECTORY = "an S3 server (moto) on the same cores", "a directory on the same disk"
LONG_STEPS = 100_000


def main() -> None:
    made = parser(__doc__, repeats=3, saves=4, every=10, device="cpu")
    made.add_argument("--folder", type=Path, help="a directory on the disk to measure")
    given = made.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as folder,
        upload_url(Path(folder)) as (url, kind),
    ):
        found = measure(Path(folder), url, given.repeats, given.saves, given.every, given.device)
    found |= {"upload": kind, "threads": torch.get_num_threads(), **facts()}
    publish(given.out, "checkpoints", found, table(found))


def measure(
    folder: Path, url: str, repeats: int, saves: int, every: int, device: str
) -> dict[str, Any]:
    """Return every save and every resume of every repeat; uploads go to `url`."""
    data = make_data(folder / "data", 1 << 20, shards=1, tokenizer_name=TOKENIZER)
    run = folder / "run"

    def saved(way: str) -> dict[str, Any]:
        config = settings(data, saves, every, device, WAYS[way])
        if way == UPLOADED:
            config = config.with_values({"checkpoint.upload": url})
        row = train(run, config)
        subprocess.run(["rm", "-r", run], check=True)
        os.sync()  # the next run must not pay for the deletion
        empty(url)
        return row

    rows = in_turns({way: partial(saved, way) for way in WAYS}, repeats)
    longer = {"log.every": 1, "train.steps": LONG_STEPS}  # it does not end before it is killed
    config = settings(data, saves, every, device, WAYS[BESIDE]).with_values(longer)
    urls = {"url": url, "directory": f"file://{folder / 'backup'}"}
    counts = {"repeats": repeats, "saves": saves, "every": every, "device": device, "rows": rows}
    return counts | {
        "resumes": resumed(folder, config, repeats),
        "restores": {
            where: resumed(folder, config.with_values({"checkpoint.upload": at}), repeats)
            for where, at in urls.items()
        },
    }


def settings(data: Path, saves: int, every: int, device: str, speedups: str) -> RunConfig:
    """Return the settings of a run that saves `saves` times and once more at its end."""
    model = {f"model.{key}": value for key, value in SHAPE.items()}
    short = {"data.path": str(data), "data.seq_len": 64, "log.every": 10**6}
    batch = {"batch.tokens_per_step": 128, "batch.rows_per_device": 2}
    saving = {"checkpoint.every_steps": every, "checkpoint.keep": 1}
    length = {"train.steps": every * (saves + 1), "train.device": device, "speedups": speedups}
    return load_config().with_values({**model, **short, **batch, **saving, **length})


def train(run: Path, config: RunConfig) -> dict:
    """Train once and return the timings of its saves."""
    summary = run_training(config, run)
    events = read_events(run)

    def of(kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["event"] == kind]

    saved = of("save")[: summary["steps"] // (config.checkpoint.every_steps or 1) - 1]
    rates = [row["perf/tokens_per_s"] for row in read_records(run) if "perf/tokens_per_s" in row]
    (last,) = (run / "checkpoints").glob("step-*")
    return {
        "blocked_ms": [event["blocked_ms"] for event in saved],
        "seconds": [event["seconds"] for event in saved],
        "reserve_ms": sum(1e3 * event["seconds"] for event in of("reserve")),
        "wall_s": summary["wall_s"],
        "tokens_per_s": rates[-1],
        "upload_s": [event["seconds"] for event in of("upload")],
        "parameters": of("start")[0]["parameters"],
        "bytes": folder_bytes(last),
        "weights_sha256": summary["weights_sha256"],
    }


def resumed(folder: Path, config: RunConfig, repeats: int) -> list[dict]:
    """Kill a run after its first save, then start it again and again; return the times.

    With uploads, it is killed after its first upload, and its directory is lost before each start.
    """
    uploads = config.checkpoint.upload is not None
    run, recipe = folder / "killed", folder / "recipe.yaml"
    shutil.rmtree(run, ignore_errors=True)
    if config.checkpoint.upload is not None:
        empty(config.checkpoint.upload)
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    command = [sys.executable, "-m", "flatout", "train", recipe, "--run-dir", run]
    saved = config.checkpoint.every_steps or 1
    first = run / "checkpoints" / f"step-{saved}"

    def is_sent() -> bool:
        return any(event["event"] == "upload" for event in read_events(run))

    started_until(command, folder, is_sent if uploads else first.exists)
    rows = []
    for number in range(1, repeats + 1):
        if uploads:
            shutil.rmtree(run)
        starts = 1 if uploads else number
        record = partial(first_record, run, starts)
        seconds = started_until(command, folder, record)
        step_s = record()["perf/step_ms"] / 1e3
        rows.append({"seconds": seconds - step_s, "step_s": step_s})
        print(f"first step after {seconds - step_s:.2f} s", file=sys.stderr)
    return rows


def first_record(run: Path, number: int) -> dict[str, Any] | None:
    """Return the first record after the `number`-th resume, or None before it."""
    resumes = [event for event in read_events(run) if event["event"] == "resume"]
    if len(resumes) < number:  # the later records are still those of the killed process
        return None
    step = resumes[-1]["step"]
    return next((record for record in read_records(run) if record["step"] > step), None)


def started_until(command: list[Any], folder: Path, true: Callable[[], object]) -> float:
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


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown.

    Raises: SystemExit when the variants trained different weights.
    """
    rows = found["rows"]
    if len({row["weights_sha256"] for way in rows.values() for row in way}) > 1:
        raise SystemExit(
            "The variants did not train the same weights: their losses are out of tolerance, "
            "and the times mean nothing."
        )
    medians = {
        way: [statistics.median(row["blocked_ms"][1:]) for row in runs]
        for way, runs in rows.items()
    }
    less = [100 * (1 - ratio) for ratio in ratios(medians[BESIDE], medians[LOOP])]
    return markdown(
        "saving | memory reserved before the first step, ms | loop blocked by the first save,"
        " ms | by each later save, ms | complete after, s | run, s",
        [
            (
                way,
                spread(row["reserve_ms"] for row in runs),
                spread(row["blocked_ms"][0] for row in runs),
                f"**{spread(later(runs))}**",
                spread(later(runs, "seconds"), 2),
                spread((row["wall_s"] for row in runs), 1),
            )
            for way, runs in rows.items()
        ],
        f"Blocked by {spread(less, 1)}% less.",
        *goals(found),
        f"{found['machine']}, on {found['device']}, {found['threads']}"
        f" thread{'s' * (found['threads'] != 1)};"
        f" {found['repeats']} repeats of {found['saves']} saves, {found['every']} steps apart;"
        f" median (smallest to largest); commit {found['commit']};"
        " `python benchmarks/checkpoints.py`.",
    )


def later(runs: list[dict[str, Any]], name: str = "blocked_ms") -> list[float]:
    """Return a value of every save but the first of each run."""
    return [figure for row in runs for figure in row[name][1:]]


def goals(found: dict[str, Any]) -> list[str]:
    """Return the results that have a goal, with it, and the cost of uploads, as sentences."""
    without, with_it = found["rows"][BESIDE], found["rows"][UPLOADED]
    first = without[0]
    blocked_ms = statistics.median(later(without))
    share = blocked_ms / (6e4 * DEFAULT_MINUTES_BETWEEN_SAVES)
    per_parameter = first["bytes"] / first["parameters"]
    beyond = per_parameter / STATE_BYTES - 1
    seconds = [row["seconds"] for row in found["resumes"]]

    def under(value: float, limit: str, text: str) -> str:
        return f"goal: under {text}: {verdict(value < LIMITS[limit])}."

    rates = [[row["tokens_per_s"] for row in rows] for rows in (with_it, without)]
    slower = [100 * (1 - ratio) for ratio in ratios(*rates)]
    uploads = [seconds for row in with_it for seconds in row["upload_s"]]
    restores = {
        where: spread((row["seconds"] for row in rows), 2)
        for where, rows in found["restores"].items()
    }
    lines = [
        f"At the default interval of {DEFAULT_MINUTES_BETWEEN_SAVES:.0f} minutes, training waits"
        f" for {100 * share:.3f}% of the time; {under(share, 'share', '1%')}",
        f"A checkpoint of {first['parameters'] / 1e6:,.0f} M parameters has"
        f" {first['bytes'] / 1e9:.2f} GB, {per_parameter:.3f} bytes per parameter,"
        f" {100 * beyond:.2f}% more than weights and moments; {under(beyond, 'bytes', '1%')}",
        f"A killed run begins its first step {spread(seconds, 2)} s after its start;"
        f" {under(statistics.median(seconds), 'resume_s', '5 s')}",
        f"With uploads to {found['upload']}, training has {spread(rates[0], 1)} tokens/s, and"
        f" {spread(rates[1], 1)} without: {spread(slower, 1)}% less. An upload of"
        f" {with_it[0]['bytes'] / 1e9:.2f} GB takes {spread(uploads, 1)} s beside training. When"
        f" the run directory is lost, the first step begins {restores['url']} s after the start"
        f" that restores it, and {restores['directory']} s with the copy in a directory.",
    ]
    if found["device"] != "cpu":
        kept = under(blocked_ms, "blocked_ms on a GPU", "50 ms")
        lines.append(f"An asynchronous save blocks the loop for {blocked_ms:.1f} ms; {kept}")
    return lines


@contextmanager
def upload_url(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the URL of an empty directory, and what it is: a server if its packages are installed.

    The server keeps what it gets in memory. Its URL and its keys are in the environment, which
    commands started meanwhile inherit.
    """
    if find_spec("moto") is None or find_spec("s3fs") is None:
        yield f"file://{folder / 'backup'}", DIRECTORY
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        began_s = time.monotonic()
        while not is_open(port):
            if time.monotonic() - began_s > SERVER_LIMIT_S or process.poll() is not None:
                raise SystemExit("The S3 server (moto) did not start.")
            time.sleep(0.05)
        os.environ |= keys | place
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/runs", S3_SERVER
    finally:
        process.kill()
        process.wait()


def empty(url: str) -> None:
    """Delete what was uploaded."""
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def is_open(port: int) -> bool:
    """Return whether a server accepts connections."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main()
