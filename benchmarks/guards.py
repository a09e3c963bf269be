"""What the guard against bad numbers costs per step, on a CPU.

    python benchmarks/guards.py

A run of the recipe `shakespeare-char` takes steps with the guard and without it in turns, in random
order within each pair. As the machine's noise is larger than the cost, the calls that the guard
adds to a step are also timed by themselves, thousands of times, with and without spikes. The share
is that of these calls in the median step. Figures on one core are those of the process's CPU time.
Writes benchmarks/results/guards.json and .md. It takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from main_job import RESULTS
from training_runs import built, code_state

from flatout import Dataset, load_config
from flatout.assembly.run import Run
from flatout.commands.prepare import prepare
from flatout.hardware import probe
from flatout.optimizers.step_guard import StepGuard
from flatout.training.metrics.bad_steps import BadSteps
from flatout.training.step import train_step

TEXT = "synthetic:documents=2000,words=300,seed=0"
PAIRS, CALLS, REPEATS = 12, 5_000, 7
TARGET = 0.005
"""Largest share of a step that all guards may take."""


class NoGuard(StepGuard):
    """Judges every step good, without looking at it."""

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Return 0."""
        return self.streak


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prepare([TEXT], out=Path(folder) / "data", tokenizer="byte")
        found = measure(Path(folder) / "data", PAIRS, CALLS)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "guards.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "guards.md").write_text(table(found))
    print(table(found))


def measure(data: Path, pairs: int, calls: int) -> dict:
    """Return the seconds of steps with and without the guard, and of its calls."""
    words = [f"data.path={data}", "train.device=cpu", "train.steps=2000", "speedups=auto,-compile"]
    run = built(load_config("shakespeare-char", words), Dataset.open(data))
    for _ in range(3):
        step_s(run)
    ways: dict[str, StepGuard] = {"with": StepGuard(spikes=6.0), "without": NoGuard()}
    steps: dict[str, list[float]] = {way: [] for way in ways}
    rng = random.Random(0)
    for _ in range(pairs):
        for way in rng.sample(sorted(ways), 2):
            run.guard = ways[way]
            steps[way].append(step_s(run))
    run.feed.close()
    return {
        "steps_s": steps,
        "call_s": {
            "not finite": [call_s(StepGuard(), calls) for _ in range(REPEATS)],
            "and spikes": [call_s(StepGuard(spikes=6.0), calls) for _ in range(REPEATS)],
        },
        "parameters": sum(parameter.numel() for parameter in run.core.parameters()),
        "tokens_per_step": run.tokens_per_step,
        "machine": probe().describe(),
        "commit": code_state(),
        "torch": torch.__version__,
    }


def step_s(run: Run) -> float:
    """Take a step, and return its seconds of CPU time."""
    batch, began = next(run.feed), time.process_time()
    train_step(run, batch)
    run.step += 1
    return time.process_time() - began


def call_s(guard: StepGuard, calls: int) -> float:
    """Return the seconds of CPU time of the guard's calls in one step."""
    loss, norms = torch.tensor(2.0), torch.rand(256) + 1
    bad_steps, result = BadSteps(), SimpleNamespace(loss=loss, grad_norm=loss)
    run, batch = SimpleNamespace(guard=guard, step=1), SimpleNamespace(start=0, position=8)

    def calls_of_a_step(grad_norm: torch.Tensor) -> None:
        guard.begin()
        bool(guard.judge(loss, grad_norm))
        bad_steps.push(run, batch, result)  # type: ignore[arg-type]
        bad_steps.ready(flush=False)

    return timed(calls_of_a_step, list(norms), calls)


def timed(call: Callable[[torch.Tensor], None], arguments: list[torch.Tensor], calls: int) -> float:
    """Return the seconds of CPU time of one call."""
    began = time.process_time()
    for number in range(calls):
        call(arguments[number % len(arguments)])
    return (time.process_time() - began) / calls


def table(found: dict) -> str:
    """Return the figures as a table."""
    step = statistics.median(found["steps_s"]["without"])
    rows = [
        "| looks for | µs per step | share of a step |",
        "|---|---|---|",
    ]
    for what, seconds in found["call_s"].items():
        middle = statistics.median(seconds)
        rows.append(f"| {what} | {1e6 * middle:.0f} | {middle / step:.3%} |")
    guarded = statistics.median(found["steps_s"]["with"])
    return (
        "\n".join(rows) + f"\n\nA step of {found['parameters'] / 1e6:.1f}M parameters and "
        f"{found['tokens_per_step']:,} tokens takes {1e3 * step:.1f} ms without the guard and "
        f"{1e3 * guarded:.1f} ms with it (medians of {len(found['steps_s']['with'])}), on "
        f"{found['machine']}, one thread, torch {found['torch']}, commit {found['commit']}.\n"
    )


if __name__ == "__main__":
    main()
