"""How far the predicted rate of GPUs is from published training runs.

    python benchmarks/published.py

Each run of benchmarks/published.yaml is made a recipe, and `gpu_time` predicts its rate
from the data sheet of its GPU. Communication between machines is taken to be hidden: few sources
state their network. Nothing is run. Writes benchmarks/results/published.json and .md.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from measurement import facts, markdown, parser, publish, verdict

from flatout.config.schema import RunConfig, load_config
from flatout.hardware.machine import machine_named
from flatout.measure.plan.gpu_rate import RECOMPUTED, gpu_time

HERE = Path(__file__).parent
TARGET = 0.2
"""Largest relative error of a prediction."""
RECOMPUTED["half-checkpointing"] = 1 / 6  # of every other layer, which is no speedup here
SPEEDUPS = {
    "none": [],
    "selective": ["selective-checkpointing"],
    "half": ["half-checkpointing"],
    "full": ["checkpointing"],
}


def recipe(run: dict[str, Any]) -> RunConfig:
    """Return a published run as a recipe."""
    keys = {
        "model.kind": "transformer",
        "model.num_layers": run["layers"],
        "model.d_model": run["d_model"],
        "model.num_heads": run["heads"],
        "model.num_kv_heads": run["kv_heads"],
        "model.d_ff": run["d_ff"],
        "model.vocab_size": run["vocab"],
        "model.activation": "swiglu" if run["gated"] else "gelu",
        "model.tied_head": str(run["tied"]).lower(),
        "data.seq_len": run["seq_len"],
        "batch.rows_per_device": run["rows"],
        "batch.accumulate": run.get("accumulate", 1),
        "batch.tokens_per_step": tokens_per_step(run),
        "parallel.shard": run["shard"],
        "parallel.tensor": run.get("tensor", 1),
        "parallel.replicate": run["gpus"] // (run["shard"] * run.get("tensor", 1)),
    }
    return load_config(None, [f"{key}={value}" for key, value in keys.items()])


def tokens_per_step(run: dict[str, Any]) -> int:
    """Return the tokens of a step of all GPUs."""
    groups = run["gpus"] // run.get("tensor", 1)
    tokens: int = run["rows"] * run["seq_len"] * groups * run.get("accumulate", 1)
    return tokens


def predicted(run: dict[str, Any]) -> float:
    """Return the predicted tokens/s of a GPU."""
    config, machine = recipe(run), machine_named(f"{run['gpus']}x {run['gpu']}")
    speedups = [*SPEEDUPS[run["checkpointing"]], *(["compile"] if run["compiled"] else [])]
    time = gpu_time(
        config,
        machine,
        "bf16",
        world_size=run["gpus"],
        speedups=speedups,
    )
    assert time is not None
    return tokens_per_step(run) / run["gpus"] / time.step_s


def measured() -> list[dict[str, Any]]:
    """Return the published runs, with the predicted rates and their errors."""
    runs = yaml.safe_load((HERE / "published.yaml").read_text())
    rates = [(run, predicted(run)) for run in runs]
    return [
        {**run, "predicted": rate, "error": rate / run["tokens_per_s"] - 1} for run, rate in rates
    ]


def main() -> None:
    options = parser(__doc__).parse_args()
    rows = measured()
    figures = {**facts(), "runs": rows}
    publish(options.out, "published", figures, table(figures))


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown, by source and GPU."""
    rows = found["runs"]
    groups = defaultdict(list)
    for row in rows:
        groups[row["source"], row["gpu"], row.get("tensor", 1)].append(row)
    lines = []
    for (source, gpu, tensor), members in groups.items():
        errors = [abs(row["error"]) for row in members]
        within = sum(error <= TARGET for error in errors)
        gpus = sorted({row["gpus"] for row in members})
        lines.append(
            (
                f"[{'/'.join(source.split('/')[3:5])}]({source})",
                gpu,
                f"{gpus[0]} to {gpus[-1]}" if gpus[1:] else str(gpus[0]),
                str(tensor) if tensor > 1 else "",
                f"{within} of {len(members)}",
                f"{statistics.median(errors):.0%}",
                f"{max(errors):.0%}",
            )
        )
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= TARGET for error in errors)
    columns = f"published by | GPU | GPUs | tensor | within {TARGET:.0%} | median error | largest"
    kept = verdict(within == len(rows))
    note = (
        f"Within {TARGET:.0%}: {within} of {len(rows)} runs; median error "
        f"{statistics.median(errors):.0%}, largest {max(errors):.0%}; "
        f"goal: all within {TARGET:.0%}: {kept}; commit {found['commit']}; "
        "`python benchmarks/published.py`."
    )
    return markdown(columns, lines, note)


if __name__ == "__main__":
    main()
