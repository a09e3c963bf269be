"""How far the predictions of `flatout plan` are from measured runs, on a CPU.

    python benchmarks/plan.py

Memory: for each case, the estimate is compared with the peak of torch's CPU allocator, whose events
its profiler records, over the first three steps: weights, optimizer state and the scratch space of
kernels count. A compiled model needs less than the estimate, which is for eager mode, by an unknown
amount, so its error is left out.

Time: each case trains twice with `flatout train` in fresh processes with an empty cache. The first
run is short. The second lasts about 15 seconds, and its summary has what was predicted for it.
Writes benchmarks/results/plan.json and .md. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measurement import facts, flatout, markdown, parser, publish, verdict
from torch.profiler import ProfilerActivity, profile
from training_runs import built

from flatout import Dataset, load_config
from flatout.assembly.memory import MemoryEstimate, estimate, workload_of
from flatout.assembly.run import Run
from flatout.config.schema import RunConfig
from flatout.training.step import train_step

MIB = 2**20
TARGETS = {"memory": 0.1, "time": 0.15}
STEPS = 3
"""Steps whose memory is recorded. The optimizer state exists from the second on."""
SHORT_STEPS = 40
"""Steps of the earlier run."""
RUN_S = 15.0
"""Duration of the predicted run, roughly."""
TEXT = ("python-stdlib", "--max-bytes", 700_000)


@dataclass(frozen=True)
class Case:
    """A model, a length, a micro-batch and speedups."""

    name: str
    overrides: tuple[str, ...]
    rows: int

    def config(self, data: Path | str) -> list[str]:
        """Return the case as overrides of the default configuration."""
        fixed = ("train.device=cpu", "train.precision=auto", "batch.accumulate=1")
        return [*self.overrides, f"data.path={data}", *fixed, f"batch.rows_per_device={self.rows}"]


def shape(layers: int, width: int, heads: int, seq_len: int, *more: str) -> tuple[str, ...]:
    """Return the overrides of a model and its length."""
    keys = ("model.num_layers", "model.d_model", "model.num_heads", "data.seq_len")
    values = (layers, width, heads, seq_len)
    return (*(f"{key}={value}" for key, value in zip(keys, values, strict=True)), *more)


EAGER, PLAIN = "speedups=auto,-compile,-compile-blocks", "speedups=none"
LLAMA = ("model.norm=rmsnorm", "model.activation=swiglu", "model.tied_head=false")
CASES = (
    Case("baseline", shape(4, 128, 2, 128, PLAIN), 12),
    Case("baseline, long", shape(2, 128, 2, 512, PLAIN), 4),
    Case("defaults", shape(4, 128, 2, 128, EAGER), 32),
    Case("defaults, one row", shape(4, 256, 4, 256, EAGER), 1),
    Case("defaults, long", shape(4, 128, 2, 1024, EAGER), 4),
    Case("Muon", shape(4, 256, 4, 128, EAGER, "optim.kind=muon"), 8),
    Case("large vocabulary", shape(2, 128, 2, 128, EAGER, "model.vocab_size=16384"), 8),
    Case(
        "large vocabulary, chunked loss",
        shape(2, 128, 2, 128, f"{EAGER},+chunked-ce", "model.vocab_size=16384"),
        32,
    ),
    Case("checkpointing", shape(6, 192, 3, 256, f"{EAGER},+checkpointing"), 16),
    Case("selective checkpointing", shape(6, 192, 3, 256, f"{EAGER},+selective-checkpointing"), 16),
    Case("Llama shape", shape(4, 192, 3, 256, EAGER, *LLAMA), 8),
    Case("eigenstate network", shape(4, 128, 2, 256, EAGER, "model.kind=eigenstate"), 8),
    Case("document mask", shape(4, 128, 2, 256, EAGER, "data.document_mask=true"), 8),
    Case("compiled", shape(4, 128, 2, 128, "speedups=auto,+compile"), 32),
    Case("compiled, long", shape(2, 256, 4, 512, "speedups=auto,+compile"), 8),
)


def main() -> None:
    made = parser(__doc__, seconds=RUN_S)
    made.add_argument("--only", help="measure the cases whose name contains this; writes nothing")
    given = made.parse_args()
    cases = [case for case in CASES if (given.only or "") in case.name]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        flatout("prepare", *TEXT, "--out", data, "--tokenizer", "byte")
        for number, case in enumerate(cases):
            row = {"name": case.name, "rows": case.rows, "overrides": case.overrides}
            row |= memory_of(case, data)
            row |= time_of(case, data, Path(folder) / str(number), given.seconds)
            rows.append(row)
            print(row, file=sys.stderr)
    found = {**facts(), "torch": torch.__version__, "seconds": given.seconds, "rows": rows}
    if not given.only:
        publish(given.out, "plan", found, table(found))


def memory_of(case: Case, data: Path) -> dict[str, Any]:
    """Return the predicted and the measured peak of the allocator, in MiB."""
    config = load_config(None, [*case.config(data), "train.steps=2000"])
    torch._dynamo.reset()
    run, found, peak = recorded(config, Dataset.open(data))
    run.loader.close()
    is_compiled = "speedups=auto,+compile" in case.overrides
    return {
        "predicted_mib": found.total / MIB,
        "allocated_mib": peak / MIB,
        "memory_error": None if is_compiled else found.total / peak - 1,
        "at": found.peak.name,
    }


def recorded(config: RunConfig, dataset: Dataset) -> tuple[Run, MemoryEstimate, int]:
    """Return a run after its first steps, the estimate for it, and the allocator's peak."""
    gc.collect()  # what an earlier run frees would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run = built(config, dataset)
        for _ in range(STEPS):
            train_step(run, next(run.loader))
            run.step += 1
    return run, estimate(workload_of(run.config), run.rows_per_device), peak_bytes(record)


def peak_bytes(recorded: profile) -> int:
    """Return the most bytes that the allocator had handed out at a time."""
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def time_of(case: Case, data: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Train, plan and train again with a cache of its own; return both times of the second."""
    folder.mkdir()
    (folder / "default.yaml").write_text("{}\n")

    home = {**os.environ, "HOME": str(folder)}

    def train(name: str, steps: int) -> dict[str, Any]:
        words = [*case.config(data), "log.every=10", f"train.steps={steps}"]
        recipe = folder / "default.yaml"
        return flatout("train", recipe, *words, "--run-dir", folder / name, env=home)

    first = train("first", SHORT_STEPS)
    tokens_per_step = first["tokens"] / SHORT_STEPS
    steps = int(min(max(seconds * first["tokens_per_s"] / tokens_per_step, 60), 20_000))
    words = [*case.config(data), f"train.steps={steps}"]
    predicted = flatout("plan", folder / "default.yaml", *words, env=home)
    second = train("second", steps)
    return {
        "steps": steps,
        "predicted_s": predicted["wall_s"],
        "wall_s": second["wall_s"],
        "time_error": predicted["wall_s"] / second["wall_s"] - 1,
        "process_error": predicted["peak_gib"] / second["peak_gib"] - 1,
    }


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown, with the errors of both predictions against their targets."""
    lines, verdicts = [], []
    for row in found["rows"]:
        seq_len = next(w for w in row["overrides"] if w.startswith("data.seq_len=")).split("=")[1]
        memory = (f"{row['predicted_mib']:,.1f}", f"{row['allocated_mib']:,.1f}")
        times = (f"{row['predicted_s']:.1f}", f"{row['wall_s']:.1f}")
        found_errors = [row[f"{what}_error"] for what in TARGETS]
        errors = ["" if error is None else f"{error:+.1%}" for error in found_errors]
        size = f"{row['rows']} x {seq_len}"
        lines.append((row["name"], size, *memory, errors[0], *times, errors[1]))
    for what, target in TARGETS.items():
        stated = [row[f"{what}_error"] for row in found["rows"]]
        errors = [abs(error) for error in stated if error is not None]
        kept = sum(error <= target for error in errors)
        verdicts.append(
            f"{what.capitalize()}: median error {statistics.median(errors):.1%}, largest "
            f"{max(errors):.1%}; within {target:.0%} in {kept} of {len(errors)} cases, "
            f"{verdict(kept == len(errors))}"
        )
    return markdown(
        "case | rows x tokens | predicted, MiB | allocated, MiB | error | predicted, s "
        "| measured, s | error",
        lines,
        f"{'; '.join(verdicts)}. "
        "Allocated is the peak of torch's allocator over three steps; compiled models "
        "need less than predicted. Time is that of a whole run of about "
        f"{found['seconds']:.0f} s after one of {SHORT_STEPS} steps. {found['machine']}; torch "
        f"{found['torch']}; commit {found['commit']}; one run each; `python benchmarks/plan.py`.",
    )


if __name__ == "__main__":
    main()
