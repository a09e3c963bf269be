"""How long commands take to start and to end, as whole processes timed from outside.

    python benchmarks/start.py --text shakespeare.txt

Prepares the characters of Shakespeare and a few conversations, then runs each command in turns, in
fresh processes: `train` of the recipe `shakespeare-char` for a few steps and its resume, with the
seconds until the first step is finished and from the last one to the end of the process;
`generate` and `chat`, until the first character arrives; `--help`; and `plan` of every recipe. All
files have been read before, as in a second run. Peak memory is the largest resident set of the
process. Writes benchmarks/results/start.json and .md. It takes two minutes and a half.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from measurement import (
    facts,
    flatout,
    in_turns,
    json_lines,
    markdown,
    prepared,
    publish,
    spread,
    text_parser,
    verdict,
)

from flatout.config.registry import RECIPES
from flatout.config.schema import load_config

STEPS = 20
TARGETS_S = {
    "train, first step": 3.0,
    "resume, first new step": 3.0,
    "generate, first token": 2.5,
    "chat, first token": 2.5,
    "--help": 0.093,
    "plan": 5.0,
}
PEAK = "peak, MiB"


def main() -> None:
    given = text_parser(__doc__, repeats=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), given.text, given.repeats)
        plans = in_turns({name: partial(planned, name) for name in RECIPES.names()}, 1)
    found = {**facts(), "repeats": given.repeats, "steps": STEPS, "rows": rows, "plans": plans}
    publish(given.out, "start", found, table(found))


def measure(folder: Path, text: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return the results of each command but `plan`, by repeat."""
    data, talk, run = prepared(folder / "data", text), folder / "talk", folder / "runs" / "chat"
    some = ("--max-documents", 200, "--split", "hash 0.05")
    flatout("prepare", "capitals", *some, "--chat", "auto", "--out", talk)
    flatout("train", "chat-demo", f"data.path={talk}", f"train.steps={STEPS}", "--run-dir", run)
    trained: list[Path] = []

    def train() -> dict[str, float]:
        trained.append(folder / "runs" / str(len(trained)))
        return trained_s("train, first step", data, trained[-1], STEPS)

    ways = {
        "train": train,
        "resume": lambda: trained_s("resume, first new step", data, trained[-1], 2 * STEPS),
        "generate": lambda: first_s("generate", trained[-1], "--max-tokens", 20),
        "chat": lambda: first_s("chat", run, "--max-tokens", 20),
        "--help": lambda: {"--help": timed("--help")[0]},
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(-1, repeats):  # in this order: the run is resumed after it was trained
        for name, rows in in_turns(ways, 1).items():
            found[name] += rows if number >= 0 else []
    return found


def timed(*words: object, reply: bool = False) -> tuple[float, float, float]:
    """Run a command; return its seconds, those until its first output, and its peak in MiB."""
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "flatout", *map(str, words)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if reply else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    if process.stdin is not None:
        process.stdin.write(b"What is the capital of Italy?\n")
        process.stdin.close()
    process.stdout.read(1)
    first_s = time.perf_counter() - began_s
    process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} exited with {process.returncode}")
    # Linux counts what this process had when it forked: 243 MiB, so smaller peaks are not seen
    return time.perf_counter() - began_s, first_s, used.ru_maxrss / 1024


def trained_s(name: str, data: Path, run: Path, steps: int) -> dict[str, float]:
    """Train up to a step; return when the first step of the process was done, and its end."""
    began = time.time()
    keys = (f"data.path={data}", f"train.steps={steps}", "log.every=1")
    keys += ("train.eval_every=0", "schedule.kind=constant")  # whose length may change
    whole_s, _, peak = timed("train", "shakespeare-char", *keys, "--run-dir", run)
    starts = [
        one for one in json_lines(run / "events.jsonl") if one["event"] in ("start", "resume")
    ]
    before_s = starts[-1]["time"] - starts[-1]["wall_s"] - began
    records = [one for one in json_lines(run / "metrics.jsonl") if "train/loss" in one]
    first, last = (before_s + records[at]["wall_s"] for at in (-STEPS, -1))
    return {name: first, "last step to exit": whole_s - last, PEAK: peak}


def first_s(command: str, run: Path, *words: object) -> dict[str, float]:
    """Return the seconds until the first character that a model writes."""
    whole_s, first, peak = timed(command, run, *words, reply=command == "chat")
    return {f"{command}, first token": first, "first token to exit": whole_s - first, PEAK: peak}


def planned(recipe: str) -> dict[str, float]:
    """Return the seconds and the peak memory of planning a recipe, as far as it needs no data."""
    known = load_config(recipe, ()).model.vocab_size
    needs = () if known else ("model.vocab_size=4096",)
    whole_s, _, peak = timed("plan", recipe, *needs)
    return {"plan": whole_s, PEAK: peak}


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    plans = [row for rows in found["plans"].values() for row in rows]
    slowest = max(found["plans"], key=lambda name: max(row["plan"] for row in found["plans"][name]))
    lines = []
    for rows in [*found["rows"].values(), plans]:
        name = next(iter(rows[0]))
        end = next((each for each in rows[0] if each.endswith("to exit")), None)
        target = TARGETS_S[name]
        lines.append(
            (
                name if rows is not plans else f"plan, {len(found['plans'])} recipes",
                spread((row[name] for row in rows), 2 if target > 1 else 3),
                f"{target:g}",
                verdict(max(row[name] for row in rows) <= target),
                spread((row[end] for row in rows), 2) if end else "",
                spread(row[PEAK] for row in rows) if PEAK in rows[0] else "",
            )
        )
    return markdown(
        "from the start of the process | seconds | target | | then until its end | peak, MiB",
        lines,
        f"Whole processes timed from outside, all files read before: `shakespeare-char` for "
        f"{found['steps']} steps, whose end scores the whole validation split, writes a sample and "
        f"saves; the slowest plan is that of {slowest}. A target is kept if every repeat keeps it. "
        f"{found['machine']}; {found['repeats']} repeats in turns, median (smallest to largest); "
        f"commit {found['commit']}; `python benchmarks/start.py`.",
    )


if __name__ == "__main__":
    main()
