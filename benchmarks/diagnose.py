"""Planted faults: whether the right one is named, in other loops and in flatout's own training.

    python benchmarks/diagnose.py --trials 3 --healthy 20 --minutes 45

Each trial is a new process: a plain PyTorch loop under `flatout.watch` with one fault of
`diagnose_loop.FAULTS`, or `flatout diagnose RECIPE` with one of `diagnose_recipe.FAULTS`, at one of
three strengths. A trial is right when the first finding is the fault's own. TraceML watches the
loops beside it where it is installed. Run it on a
quiet machine: a busy one is itself a finding. Results are written after every trial to
benchmarks/results/diagnose.json and .md; --resume continues from them. Faults that only a GPU can
have are left out on a CPU. A slow disk is planted by limiting the rate of reads, as root.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import diagnose_recipe
import torch
from diagnose_loop import CPU_ONLY, FAULTS, GPU_ONLY, HEALTHY
from main_job import RESULTS, commit

from flatout.hardware import probe

STRENGTHS = (1, 2, 3)
EXPECTED = {name: finding for name, (finding, _) in FAULTS.items()} | diagnose_recipe.FAULTS
"""Finding that should name each fault."""
TARGET = 0.95
"""Share of the trials in which the right fault must be named."""
NOTHING = "nothing"
TIMEOUT_S = 600


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=3, help="per fault and strength")
    parser.add_argument("--recipe-trials", type=int, default=1, help="the same, of a recipe")
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--recipe-healthy", type=int, default=3)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--minutes", type=float, default=90.0, help="limit for all of it")
    parser.add_argument("--only", nargs="+", help="these faults")
    parser.add_argument("--resume", action="store_true", help="keep the trials in the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    arguments = options()
    end_s = time.monotonic() + 60 * arguments.minutes
    on_gpu = torch.cuda.is_available()
    left_out = (*CPU_ONLY, *diagnose_recipe.CPU_ONLY) if on_gpu else GPU_ONLY
    faults = [
        name
        for name in EXPECTED
        if name not in left_out and (not arguments.only or name in arguments.only)
    ]
    trials = planned(faults, arguments)
    found: dict = {
        "rows": [],
        "traceml": {"missing": "TraceML was not run."},
        "planned": len(trials),
        "left_out": list(left_out),
        "trials": arguments.trials,
        "steps": arguments.steps,
        "machine": probe().describe(),
        "device": "cuda" if on_gpu else "cpu",
        "commit": commit(),
    }
    if arguments.resume:
        trials = resume(found, trials, json.loads((arguments.out / "diagnose.json").read_text()))
    with tempfile.TemporaryDirectory() as folder:
        recipe = None
        for fault, strength in trials:
            if time.monotonic() > end_s:
                break
            if fault in (diagnose_recipe.HEALTHY, *diagnose_recipe.FAULTS):
                recipe = recipe or diagnose_recipe.Recipe(Path(folder))
                row = recipe.trial(fault, strength)
            else:
                row = trial(fault, strength, arguments.steps)
            found["rows"].append(row)
            print(f"{fault}, strength {strength}: {told(row)}", file=sys.stderr, flush=True)
            write(arguments.out, found)
    loops = [name for name in faults if name in FAULTS]
    found["traceml"] = traceml(loops, arguments.steps, end_s)
    write(arguments.out, found)
    print(table(found))


def resume(found: dict, trials: list[tuple[str, int]], before: dict) -> list[tuple[str, int]]:
    """Take over the trials of an earlier run with the same plan; return those that are left."""
    found["rows"], found["planned"] = before["rows"], before["planned"]
    commits = dict.fromkeys([*before["commit"].split(", "), found["commit"]])
    found["commit"] = ", ".join(commits)
    done = Counter((row["fault"], row["strength"]) for row in before["rows"])
    left = []
    for trial in trials:
        if done[trial]:
            done[trial] -= 1
        else:
            left.append(trial)
    return left


def planned(faults: list[str], arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the trials in rounds, so that a run which ends early has tried every fault."""
    rounds = max(arguments.trials, arguments.recipe_trials, 1)
    order = random.Random(0)
    trials: list[tuple[str, int]] = []
    for number in range(rounds):
        each = [
            (fault, strength)
            for fault in faults
            for strength in STRENGTHS
            if number < (arguments.trials if fault in FAULTS else arguments.recipe_trials)
        ]
        for name, wanted in (
            (HEALTHY, arguments.healthy),
            (diagnose_recipe.HEALTHY, arguments.recipe_healthy),
        ):
            each += [(name, 1)] * (wanted * (number + 1) // rounds - wanted * number // rounds)
        order.shuffle(each)
        trials += each
    return trials


def write(folder: Path, found: dict) -> None:
    """Write the results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "diagnose.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "diagnose.md").write_text(table(found))


def told(row: dict) -> str:
    """Return the result of a trial in one line."""
    return row["error"] if "error" in row else f"{first_finding(row)}. {row['verdict']}"


def command(fault: str, strength: int, steps: int, way: str) -> list[str]:
    """Return the arguments of a trial's process."""
    file = Path(__file__).with_name("diagnose_loop.py")
    return [str(file), fault, str(strength), "--steps", str(steps), "--way", way]


def trial(fault: str, strength: int, steps: int) -> dict:
    """Run one trial under `flatout.watch`; return what it found."""
    row: dict = {"fault": fault, "strength": strength}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, *command(fault, strength, steps, "watch")],
                capture_output=True,
                text=True,
                cwd=folder,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return row | {"error": f"not done after {TIMEOUT_S} s"}
    if done.returncode:
        return row | {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    said = done.stdout.splitlines()[-1]
    return row | json.loads(said.replace(f"{Path(__file__).parents[1]}/", ""))


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
            start = ["-m", "traceml_ai.launcher.cli", "run", file, "--args", *values]
            try:
                done = subprocess.run(
                    [sys.executable, *start],
                    capture_output=True,
                    text=True,
                    cwd=folder,
                    timeout=TIMEOUT_S,
                )
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


def table(found: dict) -> str:
    """Return the confusion table as Markdown."""
    rows = found["rows"]
    planted = [name for name in EXPECTED if any(row["fault"] == name for row in rows)]
    lines = [
        "| planted | should be named | right at strength 1 | 2 | 3 | other findings named first |",
        "|---|---|---|---|---|---|",
    ]
    right = trials = 0
    for fault in planted:
        wanted, cells, others = EXPECTED[fault], [], []
        for strength in STRENGTHS:
            named = [
                first_finding(row)
                for row in rows
                if (row["fault"], row["strength"]) == (fault, strength)
            ]
            hits = sum(name == wanted for name in named)
            right, trials = right + hits, trials + len(named)
            others += [name for name in named if name != wanted]
            cells.append(f"{hits} of {len(named)}")
        lines.append(f"| {fault} | {wanted} | {' | '.join(cells)} | {counted(others)} |")
    healthy = quiet = 0
    for fault in (HEALTHY, diagnose_recipe.HEALTHY):
        named = [first_finding(row) for row in rows if row["fault"] == fault]
        hits = named.count(NOTHING)
        healthy, quiet = healthy + len(named), quiet + hits
        said = counted(name for name in named if name != NOTHING)
        lines.append(f"| {fault} | {NOTHING} | {hits} of {len(named)} | | | {said} |")
    share = right / trials if trials else 0.0
    kept = "kept" if share >= TARGET and quiet == healthy else "**missed**"
    lines += [
        "",
        f"The right fault is named first in {share:.1%} of {trials} trials, and nothing in {quiet} "
        f"of {healthy} healthy ones; target: {TARGET:.0%} and all: {kept}.",
        f"{len(rows)} of {found['planned']} trials were run in the time given.",
        *traceml_lines(found["traceml"]),
        "",
        f"{found['machine']}, on {found['device']}; not planted there: "
        f"{', '.join(found['left_out'])}; each trial is a process of {found['steps']} steps; "
        f"commit {found['commit']}; `python benchmarks/diagnose.py`.",
    ]
    return "\n".join(lines) + "\n"


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
