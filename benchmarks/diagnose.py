"""Planted faults: whether `flatout.watch` names the right one, beside TraceML where it installs.

    python benchmarks/diagnose.py --trials 3 --healthy 20

Each trial is a new process with a plain PyTorch loop and one fault of `diagnose_loop.FAULTS`, at
one of three strengths. A trial is right when the first finding is the fault's own. Then the cost of
watching is measured by leaving it out, in pairs. Run it on a quiet machine: a busy one is itself a
finding. Writes benchmarks/results/diagnose.json and .md. Faults that only a GPU can have are left
out on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from diagnose_loop import CPU_ONLY, FAULTS, GPU_ONLY, HEALTHY, Loop
from main_job import RESULTS, commit, spread

from flatout.hardware import probe

STRENGTHS = (1, 2, 3)
TARGET = 0.95
"""Share of the trials in which the right fault must be named."""
NOTHING = "nothing"
TIMEOUT_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=3, help="per fault and strength")
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--pairs", type=int, default=20, help="of the cost of watching")
    parser.add_argument("--only", help="one fault")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    left_out = CPU_ONLY if on_gpu else GPU_ONLY
    faults = [name for name in FAULTS if name not in left_out and arguments.only in (None, name)]
    planned = [
        (fault, strength)
        for fault in faults
        for strength in STRENGTHS
        for _ in range(arguments.trials)
    ] + [(HEALTHY, 1)] * arguments.healthy
    random.Random(0).shuffle(planned)
    found = {
        "rows": [trial(fault, strength, arguments.steps) for fault, strength in planned],
        "traceml": traceml(faults, arguments.steps),
        "cost": cost(arguments.pairs),
        "left_out": list(left_out),
        "trials": arguments.trials,
        "steps": arguments.steps,
        "machine": probe().describe(),
        "device": "cuda" if on_gpu else "cpu",
        "commit": commit(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "diagnose.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / "diagnose.md").write_text(table(found))
    print(table(found))


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
        return row | {"error": done.stderr.strip().splitlines()[-1]}
    row |= json.loads(done.stdout.splitlines()[-1])
    print(f"{fault}, strength {strength}: {row['verdict']}", file=sys.stderr)
    return row


def traceml(faults: list[str], steps: int) -> dict:
    """Run each fault at its greatest strength under TraceML; return its verdicts, or why not."""
    if importlib.util.find_spec("traceml_ai") is None:
        return {"missing": "TraceML is not installed (`pip install traceml-ai`)."}
    verdicts = {}
    for fault in [HEALTHY, *faults]:
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


def cost(pairs: int, steps: int = 100) -> dict:
    """Return the ratios of watched to unwatched steps, in pairs, and the seconds paid once."""
    import flatout

    with tempfile.TemporaryDirectory() as folder:
        loop = Loop("cuda" if torch.cuda.is_available() else "cpu", Path(folder))
        timed(loop, steps)
        ratios, once_s, step_s = [], [], []
        for pair in range(pairs):
            watch = flatout.watch(model=loop.model)

            def watched(watch=watch) -> tuple[float, float]:
                first = timed(loop, steps, watch)  # the warm-up and the special steps
                seconds = timed(loop, steps, watch)
                watch._loop.close()
                return first, seconds

            if pair % 2:
                (first_s, with_s), without_s = watched(), timed(loop, steps)
            else:
                without_s, (first_s, with_s) = timed(loop, steps), watched()
            ratios.append(with_s / without_s)
            once_s.append(first_s - with_s)
            step_s.append(without_s / steps)
    return {"ratios": ratios, "once_s": once_s, "step_s": step_s, "steps": steps}


def timed(loop: Loop, steps: int, watch=None) -> float:
    """Return the seconds of some steps."""
    start_s = time.perf_counter()
    if watch is None:
        for batch in loop.batches(steps):
            loop.step(batch)
    else:
        for batch in watch(loop.batches(steps)):
            with watch.step():
                loop.step(batch)
    if loop.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def first_finding(row: dict) -> str:
    """Return what a trial named first."""
    if "error" in row:
        return "error"
    return row["findings"][0] if row["findings"] else NOTHING


def table(found: dict) -> str:
    """Return the confusion table and the cost as Markdown."""
    rows = found["rows"]
    planted = [name for name in FAULTS if any(row["fault"] == name for row in rows)]
    lines = [
        "| planted | should be named | right at strength 1 | 2 | 3 | other findings named first |",
        "|---|---|---|---|---|---|",
    ]
    right = trials = 0
    for fault in planted:
        wanted, cells, others = FAULTS[fault][0], [], Counter()
        for strength in STRENGTHS:
            named = [
                first_finding(row)
                for row in rows
                if (row["fault"], row["strength"]) == (fault, strength)
            ]
            hits = sum(name == wanted for name in named)
            right, trials = right + hits, trials + len(named)
            others.update(name for name in named if name != wanted)
            cells.append(f"{hits} of {len(named)}")
        said = ", ".join(f"{name} ({number})" for name, number in others.most_common()) or "none"
        lines.append(f"| {fault} | {wanted} | {' | '.join(cells)} | {said} |")
    healthy = [first_finding(row) for row in rows if row["fault"] == HEALTHY]
    quiet = sum(name == NOTHING for name in healthy)
    said = Counter(name for name in healthy if name != NOTHING)
    others = ", ".join(f"{name} ({number})" for name, number in said.most_common()) or "none"
    lines.append(f"| {HEALTHY} | {NOTHING} | {quiet} of {len(healthy)} | | | {others} |")
    share = right / trials if trials else 0.0
    ratios = found["cost"]["ratios"]
    kept = "kept" if share >= TARGET and quiet == len(healthy) else "**missed**"
    lines += [
        "",
        f"The right fault is named first in {share:.1%} of {trials} trials, and nothing in {quiet} "
        f"of {len(healthy)} healthy ones; target: {TARGET:.0%} and all: {kept}.",
        f"Watching takes {100 * (statistics.median(ratios) - 1):+.2f}% of a step (quartiles "
        f"{quartiles(ratios)}; {len(ratios)} pairs of {found['cost']['steps']} steps of "
        f"{spread([1e3 * s for s in found['cost']['step_s']], 1)} ms); target: under 1%. The steps "
        f"near the start that are recorded take {spread(found['cost']['once_s'], 2)} s more, once.",
        *traceml_lines(found["traceml"]),
        "",
        f"{found['machine']}, on {found['device']}; not planted there: "
        f"{', '.join(found['left_out'])}; each trial is a process of {found['steps']} steps; "
        f"commit {found['commit']}; `python benchmarks/diagnose.py`.",
    ]
    return "\n".join(lines) + "\n"


def quartiles(ratios: list[float]) -> str:
    """Return the quartiles of ratios as percentages."""
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{100 * (low - 1):+.2f} to {100 * (high - 1):+.2f}%"


def traceml_lines(found: dict) -> list[str]:
    """Return TraceML's verdicts as Markdown."""
    if "missing" in found:
        return ["", found["missing"]]
    lines = ["", "| planted, strength 3 | TraceML's verdict |", "|---|---|"]
    return lines + [f"| {fault} | {verdict} |" for fault, verdict in found["verdicts"].items()]


if __name__ == "__main__":
    main()
