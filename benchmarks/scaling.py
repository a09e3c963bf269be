"""What 1, 2 and 4 processes do on the cores of this machine, with each way to use them.

    python benchmarks/scaling.py

The processes share two cores and have one thread each, so that two are at most twice as fast as
one, and four no faster than two: the results show what a way costs, not how it scales. A small
transformer trains with every way in turns, in fresh processes: copies (DDP), shards (FSDP2), and
processes that share rows. Each way has the same sequences per step; losses are compared with those
of one process. The time in communication is that in which at least one collective of gloo is in
progress on rank 0, waiting for the others included, in a run of its own under torch's profiler.
Writes benchmarks/results/scaling.json and .md. Takes about six minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from measurement import facts, flatout, in_turns, json_lines, markdown, parser, publish, spread

from flatout.cli.commands.prepare import prepare

TEXT = "synthetic:documents=500,words=200,seed=0"
RUN = {
    "model.num_layers": 4,
    "model.d_model": 128,
    "model.num_heads": 4,
    "data.seq_len": 256,
    "batch.tokens_per_step": 4096,
    "batch.rows_per_device": 4,
    "optim.kind": "adamw",
    "optim.lr": "1e-3",
    "train.device": "cpu",
    "train.precision": "fp32",
    "train.eval_every": 0,
    "log.every": 10,
}
WAYS = {
    "1 process": (1, []),
    "2, copies": (2, []),
    "4, copies": (4, []),
    "2, shards": (2, ["parallel.shard=2"]),
    "4, shards": (4, ["parallel.shard=4"]),
    "2, sharing rows": (2, ["parallel.context=2"]),
    "4, sharing rows": (4, ["parallel.context=4"]),
}


def train(folder: Path, way: str, steps: int) -> dict[str, Any]:
    """Train with a way; return the steady rate and the losses."""
    count, keys = WAYS[way]
    with tempfile.TemporaryDirectory(dir=folder) as run:
        words = [*words_of(folder, steps), *keys, f"train.devices={count}"]
        found = flatout("train", "demo", *words, "--run-dir", f"{run}/run", env=environment())
        lines = json_lines(Path(run, "run", "metrics.jsonl"))
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return {"tokens_per_s": found["tokens_per_s"], "losses": losses}


def words_of(folder: Path, steps: int) -> list[str]:
    """Return the settings of all ways."""
    settings = {**RUN, "train.steps": steps, "data.path": folder / "data"}
    return [f"{key}={value}" for key, value in settings.items()]


def environment() -> dict[str, str]:
    """Return an environment in which each process has one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def busy_share(folder: Path, way: str, steps: int) -> float:
    """Return the share of the steps' time in which a collective is in progress."""
    count, keys = WAYS[way]
    words = [*("-m", "torch.distributed.run", "--standalone"), f"--nproc-per-node={count}"]
    words += [__file__, "--profile", str(folder / way), *words_of(folder, steps), *keys]
    done = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def profiled(folder: Path, words: list[str]) -> None:
    """Train, as one of several processes, and print the share that `busy_share` returns."""
    from torch.profiler import ProfilerActivity, profile

    from flatout.config.schema import load_config
    from flatout.training import loop
    from flatout.training.run import run_training

    spans: list[tuple[float, float]] = []
    fit = loop.fit

    def observed(session: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            run = fit(session)
        spans.extend(
            (event.time_range.start, event.time_range.end)
            for event in found.events() or ()
            if event.name.startswith("gloo:")
        )
        return run

    sys.modules["flatout.training.run"].fit = observed  # type: ignore[attr-defined]
    run_training(load_config("demo", words), folder)
    busy, reached = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    if os.environ["RANK"] == "0":
        print(busy / (reached - min(spans)[0]))


def main() -> None:
    made = parser(__doc__, rounds=3, steps=60)
    made.add_argument("--profile", nargs="+", help="one of several processes; for itself")
    options = made.parse_args()
    if options.profile:
        profiled(Path(options.profile[0]), options.profile[1:])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare([TEXT], out=folder / "data", tokenizer="byte")
        rows = in_turns(
            {way: partial(train, folder, way, options.steps) for way in WAYS}, options.rounds
        )
        shares = {way: busy_share(folder, way, 30) for way in WAYS if WAYS[way][0] > 1}
    found = {**facts(), "rows": rows, "shares": shares, "steps": options.steps}
    publish(options.out, "scaling", found, table(found))


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    alone = found["rows"]["1 process"]
    lines = []
    for way, runs in found["rows"].items():
        relative = [
            run["tokens_per_s"] / one["tokens_per_s"] for run, one in zip(runs, alone, strict=True)
        ]
        apart = max(
            abs(loss / known - 1)
            for run in runs
            for loss, known in zip(run["losses"], alone[0]["losses"], strict=True)
        )
        share = found["shares"].get(way)
        lines.append(
            (
                way,
                spread(run["tokens_per_s"] for run in runs),
                spread(relative, 2),
                "" if share is None else f"{share:.0%}",
                f"{apart:.1g}",
            )
        )
    return markdown(
        "processes | tokens/s | times one process | in communication | largest error of a loss",
        lines,
        f"All share the cores of {found['machine']}; one thread per process; {len(alone)} runs of "
        f"{found['steps']} steps in turns, median (smallest to largest); commit {found['commit']}; "
        "`python benchmarks/scaling.py`.",
    )


if __name__ == "__main__":
    main()
