"""What the guards against bad numbers, failures and hangs cost per step, on a CPU.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/guards.py

The guards: a step with bad results, spikes included, is skipped and reported. A copy of the random
generators lets a step that runs out of memory, or that a signal drops, start again. The watchdog
counts the work done; alarms watch every record. A run of the recipe `shakespeare-char` takes steps
with all of them and with none in turns, in random order within each pair; pairs of two steps
without show the noise. As that is larger than the cost, the calls that each guard adds to a step
are also timed by themselves, thousands of times. The share is that of these calls in the median
step. Results are CPU time of the process, on one core. Writes benchmarks/results/guards.json and
.md. Ends after `--minutes` and the calls.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measurement import facts, markdown, parser, publish, verdict
from training_runs import built, code_state
from watch_cost import decided, share

from flatout import Dataset, load_config
from flatout.assembly.run import Pulse, Run
from flatout.cli.commands.prepare import prepare
from flatout.optim.step_guard import StepGuard
from flatout.training.metrics.alarms import Alarms
from flatout.training.metrics.bad_steps import BadSteps
from flatout.training.metrics.surroundings import Surroundings
from flatout.training.step import StepStart, train_step

TEXT = "synthetic:documents=2000,words=300,seed=0"
CALLS, REPEATS = 5_000, 7
NOISE_EVERY = 3
"""Every third pair has two steps without guards."""
SPIKES = 6.0
TARGET = 0.005
"""Largest share of a step that all guards may take."""


class NoGuard(StepGuard):
    """Judges every step good, without looking at it."""

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Return 0."""
        return self.streak


class NoPulse(Pulse):
    """Counts nothing."""

    def beat(self) -> None:
        """Do nothing."""


Guards = tuple[StepGuard, Pulse, BadSteps | None, Alarms | None]


def main() -> None:
    given = parser(__doc__, minutes=4.0).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prepare([TEXT], out=Path(folder) / "data", tokenizer="byte")
        found = measure(Path(folder) / "data", 60 * given.minutes, CALLS)
    publish(given.out, "guards", found, table(found))


def measure(data: Path, seconds: float, calls: int) -> dict[str, Any]:
    """Return the seconds of pairs of steps with and without guards, and of the guards' calls."""
    words = [f"data.path={data}", "train.device=cpu", "train.steps=20000", "speedups=auto,-compile"]
    run = built(load_config("shakespeare-char", words), Dataset.open(data))
    every = run.config.log.every
    guarded = (StepGuard(spikes=SPIKES), Pulse(), BadSteps(), new_alarms(run))
    plain: Guards = (NoGuard(), NoPulse(), None, None)
    for _ in range(5):
        step_s(run, every, guarded)
    found: dict[str, Any] = {"pairs": [], "noise": []}
    rng, end_s = random.Random(0), time.monotonic() + seconds
    while not found["pairs"] or time.monotonic() < end_s:
        if len(found["pairs"]) % NOISE_EVERY == NOISE_EVERY - 1:
            found["noise"].append([step_s(run, every, plain) for _ in range(2)])
        times = {way: step_s(run, every, way) for way in rng.sample((guarded, plain), 2)}
        found["pairs"].append([times[guarded], times[plain]])
    called = {name: [call(calls) for _ in range(REPEATS)] for name, call in each_guard(run).items()}
    run.loader.close()
    return {
        **found,
        "call_s": called,
        "log_every": every,
        "parameters": sum(parameter.numel() for parameter in run.core.parameters()),
        "tokens_per_step": run.tokens_per_step,
        "micro_batches": run.config.batch.accumulate or 1,
        **facts(),
        "commit": code_state(),
        "torch": torch.__version__,
    }


def step_s(run: Run, every: int, guards: Guards) -> float:
    """Take a step with the given guards, and return its seconds of CPU time."""
    run.guard, run.pulse, bad_steps, alarms = guards
    batch, began = next(run.loader), time.process_time()
    run.pulse.beat()
    if alarms is not None:  # train_step itself makes one only for several micro-batches
        StepStart(run)
    result = train_step(run, batch)
    run.step += 1
    if bad_steps is not None:
        bad_steps.push(run, batch, result)
        bad_steps.ready(flush=False)
    if alarms is not None and run.step % every == 0:
        alarms.see(record(run.step))
    return time.process_time() - began


def new_alarms(run: Run) -> Alarms:
    """Return the alarms of a run on a CPU."""
    surroundings = Surroundings(cores=run.machine.cores)
    memory = {"mem/process_gib": run.machine.memory_gib}
    return Alarms(surroundings, last_step=run.last_step, have_gib=memory)


def record(step: int) -> dict[str, float]:
    """Return a record of a healthy run with a step of a quarter of a second."""
    return {
        "step": step,
        "wall_s": step / 4,
        "train/loss": 2 + 1 / step,
        "train/grad_norm": 1 + step % 7 / 10,
        "train/lr": 1e-3,
        "perf/tokens_per_s": 65_000 + step % 11,
        "perf/step_ms": 250.0,
        "perf/data_wait_ms": 0.1,
        "perf/host_ms": 250.0,
        "mem/process_gib": 1.0,
    }


def each_guard(run: Run) -> dict[str, Callable[[int], float]]:
    """Return, by name, what times a guard's calls in one step, given how often to call them."""
    loss, norms = torch.tensor(2.0), list(torch.rand(256) + 1)
    every, micro_batches = run.config.log.every, run.config.batch.accumulate or 1

    def judging(guard: StepGuard) -> Callable[[int], None]:
        bad_steps, result = BadSteps(), SimpleNamespace(loss=loss, grad_norm=loss)
        fake, batch = SimpleNamespace(guard=guard, step=1), SimpleNamespace(start=0, position=8)

        def judge(number: int) -> None:
            guard.begin()
            bool(guard.judge(loss, norms[number % len(norms)]))
            bad_steps.push(fake, batch, result)
            bad_steps.ready(flush=False)

        return judge

    def beat(number: int) -> None:
        for _ in range(micro_batches + 1):
            pulse.beat()

    pulse, alarms = Pulse(), new_alarms(run)

    def see(number: int) -> None:
        if number % every == 0:
            alarms.see(record(number + every))

    return {
        "figures that are not finite": partial(timed, judging(StepGuard())),
        "these and spikes (train.skip_spikes)": partial(timed, judging(StepGuard(spikes=SPIKES))),
        "the state to start a step again": partial(timed, lambda _: StepStart(run)),
        "the watchdog's count": partial(timed, beat),
        f"alarms, once in {every} steps": partial(timed, see),
    }


def timed(call: Callable[[int], object], calls: int) -> float:
    """Return the seconds of CPU time of one call."""
    began = time.process_time()
    for number in range(calls):
        call(number)
    return (time.process_time() - began) / calls


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    step = statistics.median(plain_s for _, plain_s in found["pairs"])
    middles = {what: statistics.median(seconds) for what, seconds in found["call_s"].items()}
    total = sum(middles.values()) - next(iter(middles.values()))  # the second includes the first
    goal = f"**{total / step:.3%}**; goal 0.5%: {verdict(total / step < TARGET)}"
    noise = f"; two steps without: {share(found['noise'])}" if found["noise"] else ""
    count = found["micro_batches"]
    return markdown(
        "guard against, or by | µs per step | share of a step",
        [
            *((what, f"{1e6 * s:.1f}", f"{s / step:.4%}") for what, s in middles.items()),
            ("all", f"{1e6 * total:.1f}", goal),
        ],
        f"Measured by leaving all out, a step with guards takes {share(found['pairs'])} more CPU "
        f"time (median of {len(found['pairs'])} pairs, 95% interval{noise}); goal 0.5%: "
        f"{decided(found['pairs'], TARGET)}. "
        f"A step of {found['parameters'] / 1e6:.1f}M parameters, "
        f"{found['tokens_per_step']:,} tokens and {count} micro-batch{'es' * (count != 1)} takes "
        f"{1e3 * step:.1f} ms without.",
        "",
        f"{found['machine']}, one thread, torch {found['torch']}, "
        f"commit {found['commit']}; `python benchmarks/guards.py`.",
    )


if __name__ == "__main__":
    main()
