"""Planted faults: whether the right one is named, in other loops and in flatout's own training.

    python benchmarks/diagnose.py --trials 3 --healthy 20 --minutes 45

Each trial is a new process: a plain PyTorch loop under `flatout.watch` with one fault of
`diagnose_loop.FAULTS`, or `flatout diagnose RECIPE` with one of RECIPE_FAULTS, at one of three
strengths. There a slow source is planted by a `sitecustomize.py`, which Python imports at its
start. The other faults are settings of the recipe or of the environment. A trial is right when the
first finding is the fault's own. TraceML watches the loops beside it where it is installed. Run it
on a quiet machine: a busy one is itself a finding. Results are written after every trial to
benchmarks/results/diagnose.json and .md. Faults that only a GPU can
have are omitted on a CPU. A slow disk is planted by limiting the rate of reads, as root.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diagnose_loop import CPU_ONLY, FAULTS, GPU_ONLY, HEALTHY
from measurement import facts, flatout, json_of, markdown, parser, publish, verdict

STRENGTHS = (1, 2, 3)
RECIPE_FAULTS = {
    "recipe: slow source": "slow-data",
    "recipe: slow save": "slow-save",
    "recipe: needless evaluation": "frequent-evaluation",
    "recipe: CPU thread cap": "cpu-threads",
    "recipe: few rows": "slow-settings",
    "recipe: needless checkpointing": "slow-settings",
    "recipe: no speedups": "slow-settings",
}
"""Finding that should name each fault."""
RECIPE_CPU_ONLY = (
    "recipe: CPU thread cap",
    "recipe: few rows",
    "recipe: needless checkpointing",
    "recipe: no speedups",
)
RECIPE_HEALTHY = "recipe: healthy"
TOKENS_PER_STEP = 4096
RECIPE = """\
model: {num_layers: 4, d_model: 128, num_heads: 2}
data: {path: data, seq_len: 64}
batch: {tokens_per_step: 4096}
train: {steps: 3000}
checkpoint: {every_minutes: 10}
speedups: auto
"""
SLOW_SOURCE = """\
import time
from flatout.data.load.batches import ShardReader

plain = ShardReader.read


def read(self, *arguments):
    time.sleep({seconds})
    return plain(self, *arguments)


ShardReader.read = read
"""

EXPECTED = {name: finding for name, (finding, _) in FAULTS.items()} | RECIPE_FAULTS
"""Finding that should name each fault."""
TARGET = 0.95
"""Share of the trials in which the right fault must be named."""
NOTHING = "nothing"
TIMEOUT_S = 600


def main() -> None:
    counts = {"trials": 3, "recipe_trials": 1, "healthy": 20, "recipe_healthy": 3}
    made = parser(__doc__, **counts, steps=70, minutes=90.0)
    made.add_argument("--only", nargs="+", help="these faults")
    given = made.parse_args()
    end_s = time.monotonic() + 60 * given.minutes
    on_gpu = torch.cuda.is_available()
    left_out = (*CPU_ONLY, *RECIPE_CPU_ONLY) if on_gpu else GPU_ONLY
    wanted = given.only or EXPECTED
    faults = [name for name in EXPECTED if name not in left_out and name in wanted]
    trials = planned(faults, given)
    found: dict[str, Any] = {
        "rows": [],
        "traceml": {"missing": "TraceML was not run."},
        "planned": len(trials),
        "left_out": list(left_out),
        "trials": given.trials,
        "steps": given.steps,
        "device": "cuda" if on_gpu else "cpu",
        **facts(),
    }
    with tempfile.TemporaryDirectory() as folder:
        recipe = None
        for fault, strength in trials:
            if time.monotonic() > end_s:
                break
            row: dict[str, Any] = {"fault": fault, "strength": strength}
            try:
                if fault in (RECIPE_HEALTHY, *RECIPE_FAULTS):
                    recipe = recipe or Recipe(Path(folder))
                    row |= recipe.trial(fault, strength)
                else:
                    row |= trial(fault, strength, given.steps)
            except subprocess.TimeoutExpired:
                row["error"] = f"not done after {TIMEOUT_S} s"
            except SystemExit as error:
                row["error"] = (str(error).strip().splitlines() or ["no output"])[-1]
            found["rows"].append(row)
            print(row, file=sys.stderr, flush=True)
            publish(given.out, "diagnose", found, table(found))
    loops = [name for name in faults if name in FAULTS]
    found["traceml"] = traceml(loops, given.steps, end_s)
    publish(given.out, "diagnose", found, table(found))


def planned(faults: list[str], given: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the trials in rounds, so that a run which ends early has tried every fault."""
    rounds = max(given.trials, given.recipe_trials, 1)
    order = random.Random(0)
    trials: list[tuple[str, int]] = []
    for number in range(rounds):
        each = [
            (fault, strength)
            for fault in faults
            for strength in STRENGTHS
            if number < (given.trials if fault in FAULTS else given.recipe_trials)
        ]
        for name, wanted in ((HEALTHY, given.healthy), (RECIPE_HEALTHY, given.recipe_healthy)):
            each += [(name, 1)] * (wanted * (number + 1) // rounds - wanted * number // rounds)
        order.shuffle(each)
        trials += each
    return trials


def command(fault: str, strength: int, steps: int, way: str) -> list[str]:
    """Return the arguments of a trial's process."""
    file = Path(__file__).with_name("diagnose_loop.py")
    return [str(file), fault, str(strength), "--steps", str(steps), "--way", way]


def trial(fault: str, strength: int, steps: int) -> dict[str, Any]:
    """Run one trial under `flatout.watch`; return what it found."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *command(fault, strength, steps, "watch")]
        found = json_of(words, cwd=folder, timeout=TIMEOUT_S)
    # findings name lines of code: without the path of this checkout
    return json.loads(json.dumps(found).replace(f"{Path(__file__).parents[1]}/", ""))


class Recipe:
    """A small recipe with its data. The first trial measures the time of a healthy step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step_s: float | None = None
        (folder / "recipe.yaml").write_text(RECIPE)
        words = random.Random(0).choices(["to ", "be ", "or ", "not ", "that ", "is "], k=500_000)
        (folder / "text.txt").write_text("".join(words))
        words = ("text.txt", "--out", "data", "--tokenizer", "char", "--split", "tail 0.1")
        flatout("prepare", *words, cwd=folder, timeout=TIMEOUT_S)

    def trial(self, fault: str, strength: int) -> dict[str, Any]:
        """Run one trial, and return what the diagnosis found."""
        given: dict[str, Any] = {"cwd": self._folder, "timeout": TIMEOUT_S}
        if self._step_s is None:
            self._step_s = flatout("diagnose", "recipe.yaml", **given)["step_s"]
        with tempfile.TemporaryDirectory() as start:
            overrides, changes = planted(fault, strength, self._step_s, Path(start))
            environment = os.environ | changes
            found = flatout("diagnose", "recipe.yaml", *overrides, env=environment, **given)
        return {
            "findings": [finding["name"] for finding in found["findings"]],
            "verdict": found["verdict"],
            "shares": found["shares"],
            "step_ms": 1e3 * (found["step_s"] or 0.0),
        }


def planted(
    fault: str, strength: int, step_s: float, start: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the overrides and environment variables of a fault."""
    number = strength - 1
    if fault == "recipe: slow source":  # the reader works ahead: it must take longer than a step
        seconds = step_s * (1.5, 2, 3)[number]
        (start / "sitecustomize.py").write_text(SLOW_SOURCE.format(seconds=seconds))
        paths = [str(start), *filter(None, [os.environ.get("PYTHONPATH")])]
        return [], {"PYTHONPATH": os.pathsep.join(paths)}
    if fault == "recipe: slow save":
        every = (f"checkpoint.every_steps={(4, 2, 1)[number]}", "checkpoint.every_minutes=null")
        return [*every, "speedups=auto,-async-checkpoints"], {}
    if fault == "recipe: needless evaluation":
        tokens = int(TOKENS_PER_STEP * (1.5, 3, 6)[number])
        return ["train.eval_every=1", f"train.eval_tokens={tokens}"], {}
    if fault == "recipe: CPU thread cap":
        return [f"batch.tokens_per_step={TOKENS_PER_STEP * strength}"], {"OMP_NUM_THREADS": "1"}
    if fault == "recipe: few rows":
        return [f"batch.rows_per_device={(4, 2, 1)[number]}"], {}
    if fault == "recipe: needless checkpointing":
        return ["speedups=auto,+checkpointing", f"model.num_layers={4 * strength}"], {}
    if fault == "recipe: no speedups":
        return ["speedups=none", f"batch.tokens_per_step={TOKENS_PER_STEP * strength}"], {}
    return [], {}


def traceml(faults: list[str], steps: int, end_s: float) -> dict:
    """Run each fault at its greatest strength under TraceML; return its verdicts, or why not."""
    if importlib.util.find_spec("traceml_ai") is None:
        return {"missing": "TraceML is not installed (`pip install traceml-ai`)."}
    verdicts = {}
    for fault in [HEALTHY, *faults]:
        if time.monotonic() > end_s:
            break
        with tempfile.TemporaryDirectory() as folder:
            file, *values = command(fault, 3, steps, "traceml")
            words = [
                sys.executable,
                "-m",
                "traceml_ai.launcher.cli",
                "run",
                file,
                "--args",
                *values,
            ]
            given: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
            try:
                done = subprocess.run(words, cwd=folder, **given)
            except subprocess.TimeoutExpired:
                verdicts[fault] = "not done"
                continue
            said = [line for line in done.stdout.splitlines() if "Verdict:" in line]
            verdicts[fault] = said[-1].strip("| ").removeprefix("Verdict:").strip() if said else "-"
            print(f"TraceML, {fault}: {verdicts[fault]}", file=sys.stderr)
    return {"verdicts": verdicts}


def first_finding(row: dict) -> str:
    """Return what a trial named first."""
    if "error" in row:
        return "error"
    return row["findings"][0] if row["findings"] else NOTHING


def table(found: dict[str, Any]) -> str:
    """Return the confusion table as Markdown."""
    rows = found["rows"]

    def named(fault: str, *strengths: int) -> list[str]:
        """Return the first finding of each trial of a fault."""
        return [
            first_finding(row)
            for row in rows
            if row["fault"] == fault and row["strength"] in strengths
        ]

    lines, right, trials = [], 0, 0
    for fault, wanted in EXPECTED.items():
        if every := named(fault, *STRENGTHS):
            by_strength = [named(fault, strength) for strength in STRENGTHS]
            cells = [f"{names.count(wanted)} of {len(names)}" for names in by_strength]
            others = (name for names in by_strength for name in names if name != wanted)
            lines.append((fault, wanted, *cells, counted(others)))
            right, trials = right + every.count(wanted), trials + len(every)
    healthy = quiet = 0
    for fault in (HEALTHY, RECIPE_HEALTHY):
        every = named(fault, *STRENGTHS)
        hits = every.count(NOTHING)
        healthy, quiet = healthy + len(every), quiet + hits
        said = counted(name for name in every if name != NOTHING)
        lines.append((fault, NOTHING, f"{hits} of {len(every)}", "", "", said))
    share = right / trials if trials else 0.0
    is_kept = share >= TARGET and quiet == healthy
    return markdown(
        "planted | should be named | right at strength 1 | 2 | 3 | other findings named first",
        lines,
        f"The right fault is named first in {share:.1%} of {trials} trials, and nothing in {quiet} "
        f"of {healthy} healthy ones; target: {TARGET:.0%} and all: {verdict(is_kept)}.",
        f"{len(rows)} of {found['planned']} trials were run in the time given.",
        *traceml_lines(found["traceml"]),
        "",
        f"{found['machine']}, on {found['device']}; not planted there: "
        f"{', '.join(found['left_out'])}; each trial is a process of {found['steps']} steps; "
        f"commit {found['commit']}; `python benchmarks/diagnose.py`.",
    )


def counted(names: Iterable[str]) -> str:
    """Return names with how often each occurs."""
    found = Counter(names).most_common()
    return ", ".join(f"{name} ({number})" for name, number in found) or "none"


def traceml_lines(found: dict) -> list[str]:
    """Return TraceML's verdicts as Markdown."""
    if "missing" in found:
        return ["", found["missing"]]
    lines = ["", "| planted, strength 3 | TraceML's verdict |", "|---|---|"]
    return lines + [f"| {fault} | {verdict} |" for fault, verdict in found["verdicts"].items()]


if __name__ == "__main__":
    main()
