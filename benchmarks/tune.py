"""`flatout tune` against an exhaustive grid of the same settings, in a fifth of the grid's time.

    python benchmarks/tune.py

The grid measures every micro-batch with every checkpointing policy, with and without fused
attention and fused AdamW, once. tune then gets a fifth of that time, twice: from what `auto`
chooses, and from a recipe that states one row. In the end, the best two settings of the grid and
what tune found are measured again, in alternation. Writes benchmarks/results/tune.json and .md.
Every trial is written to tune-trials.jsonl as soon as it ends. After an interruption, the same
command continues from there. Takes about half an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measurement import facts, markdown, parser, publish, spread, verdict
from training_runs import remembered

import flatout
from flatout.config.schema import RunConfig, load_config
from flatout.measure.experiments.points import filling
from flatout.measure.experiments.records import TrialSpec
from flatout.measure.experiments.resolving import resolve_here
from flatout.measure.experiments.space import Setting, rows_to_try
from flatout.measure.experiments.trial import run_trial
from flatout.measure.experiments.tune import run_tune

OVERRIDES = (
    *("model.num_layers=4", "model.d_model=128", "model.num_heads=4", "data.seq_len=128"),
    *("batch.tokens_per_step=4096", "train.steps=100000", "train.device=cpu"),
    "train.precision=fp32",
)
POLICIES = (None, "selective-checkpointing", "checkpointing")
SWITCHES = ("fused-attention", "fused-adamw")
ONLY = ("batch", "checkpointing", *SWITCHES)
SHARE = 1 / 5
"""Share of the grid's time that tune gets."""
WITHIN = 0.97
"""Target: the rate that tune finds, relative to the best of the grid."""
TIMEOUT_S = 120.0


def main() -> None:
    made = parser(__doc__, repeats=9, seconds=1.0)
    made.add_argument("--rows", type=int, nargs="*", help="of the grid; all by default")
    given = made.parse_args()
    given.out.mkdir(exist_ok=True)
    trials = given.out / "tune-trials.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, [*OVERRIDES, f"data.path={prepare(Path(folder))}"])
        found = measure(config, Path(folder), given, trials)
    publish(given.out, "tune", found, table(found))
    trials.unlink()


def prepare(folder: Path) -> Path:
    """Prepare Python's own standard library as characters."""
    text = folder / "text.txt"
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    text.write_text("".join(file.read_text(errors="replace") for file in files[:60]))
    flatout.prepare([str(text)], folder / "data", tokenizer="char", split="tail 0.1")
    return folder / "data"


def measure(
    config: RunConfig, folder: Path, options: argparse.Namespace, trials: Path
) -> dict[str, Any]:
    """Measure the grid, then tune, then all winners in alternation."""

    def once(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began_s = time.perf_counter()
        return remembered(
            {"name": name}, trials, lambda: {**call(), "seconds": time.perf_counter() - began_s}
        )

    def rate_of(setting: Setting, number: int) -> dict[str, Any]:
        return once(
            f"round {number}: {described(setting)}",
            partial(trial_of, config, setting, number, folder, options.seconds),
        )

    lines = {each: rate_of(each, 0) for each in settings_of(config, options.rows)}
    grid = {setting: line["tokens_per_s"] for setting, line in lines.items()}
    grid_s = sum(line["seconds"] for line in lines.values())
    starts = {"auto": config, "1 row": config.with_values({"batch.rows_per_device": 1})}
    found = {
        name: once(f"tune from {name}", partial(tuned_from, start, folder, SHARE * grid_s))
        for name, start in starts.items()
    }
    tuned = {
        name: Setting(line["rows"], line["prefetch"], frozenset(line["speedups"]))
        for name, line in found.items()
    }
    top = sorted(grid, key=lambda setting: -grid[setting])[:2]
    rates: dict[Setting, list[float]] = {setting: [] for setting in (*top, *tuned.values())}
    for number in range(1, options.repeats + 1):
        for setting in rates:
            rates[setting].append(rate_of(setting, number)["tokens_per_s"])
    best_of_grid = max(top, key=lambda setting: statistics.median(rates[setting]))
    return {
        **facts(),
        "repeats": options.repeats,
        "grid_trials": len(grid),
        "grid_s": grid_s,
        "grid": [{"setting": described(each), "tokens_per_s": grid[each]} for each in grid],
        "best_of_grid": {"setting": described(best_of_grid), "rates": rates[best_of_grid]},
        "tuned": [
            {
                "start": name,
                "setting": described(setting),
                "rates": rates[setting],
                "seconds": found[name]["seconds"],
                "trials": found[name]["trials"],
            }
            for name, setting in tuned.items()
        ],
    }


def tuned_from(start: RunConfig, folder: Path, seconds: float) -> dict:
    """Return the setting that tune finds in some seconds, and its number of trials."""
    result = run_tune(start, out=folder / "tuned.yaml", minutes=seconds / 60, only=ONLY)
    return {
        "rows": result.best.rows_per_device,
        "prefetch": result.best.prefetch,
        "speedups": result.best.speedups,
        "trials": len(result.trials),
    }


def settings_of(config: RunConfig, only_rows: Sequence[int] | None = None) -> list[Setting]:
    """Return the settings of the grid: those that tune can reach with ONLY."""
    resolved = resolve_here(config)
    fixed = {*resolved.speedups} - {*filling("micro_batch"), *SWITCHES}
    sequences = (resolved.config.batch.tokens_per_step or 0) // resolved.config.data.seq_len
    rows = rows_to_try(int(resolved.config.batch.rows_per_device), sequences)
    switches = itertools.product(*([name, None] for name in SWITCHES))
    return [
        Setting(count, config.data.prefetch, frozenset({*fixed, policy, *on} - {None}))
        for count, policy, on in itertools.product(only_rows or rows, POLICIES, list(switches))
    ]


def trial_of(
    config: RunConfig, setting: Setting, number: int, folder: Path, seconds: float
) -> dict:
    """Return the tokens per second of one trial; 0 and the reason for one that failed."""
    keys = setting.values(config.batch.tokens_per_step or 0)
    values = config.with_values(keys | {"train.seed": number}).to_dict()
    timing = {"seconds": seconds, "loss_steps": 0, "warmup_s": 6.0}
    spec = TrialSpec(config=values, folder=tempfile.mkdtemp(dir=folder), **timing)
    result = run_trial(spec, TIMEOUT_S)
    return {"tokens_per_s": result.tokens_per_s or 0.0, "reason": result.reason}


def described(setting: Setting) -> str:
    """Return the setting as the table shows it."""
    policy = next((name for name in POLICIES if name in setting.speedups), "no checkpointing")
    rows = f"{setting.rows} row{'s' if setting.rows > 1 else ''}"
    on = [name for name in SWITCHES if name in setting.speedups]
    return ", ".join([rows, str(policy), *on])


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    best = found["best_of_grid"]
    shares = [
        statistics.median(row["rates"]) / statistics.median(best["rates"]) for row in found["tuned"]
    ]
    rows = [
        (
            *(f"tune from {row['start']}", row["setting"], spread(row["rates"])),
            *(f"{share:.0%}", row["trials"], f"{row['seconds']:.0f}"),
        )
        for row, share in zip(found["tuned"], shares, strict=True)
    ]
    grid = (spread(best["rates"]), "", found["grid_trials"], f"{found['grid_s']:.0f}")
    return markdown(
        "| setting | tokens/s | of the grid's best | trials | seconds",
        [("grid", best["setting"], *grid), *rows],
        f"Target: at least {WITHIN:.0%} of the grid's best in a fifth of its time: "
        f"{verdict(min(shares) >= WITHIN)}. "
        f"{found['machine']}; 4 layers, width 128, 128 tokens, 4,096 tokens per step; "
        f"{found['repeats']} repeats of the best settings in alternation; median (smallest to "
        f"largest); commit {found['commit']}; `python benchmarks/tune.py`.",
    )


if __name__ == "__main__":
    main()
