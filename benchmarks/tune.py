"""`flatout tune` against an exhaustive grid of the same settings, in a fifth of the grid's time.

    python benchmarks/tune.py

The grid measures every micro-batch with every checkpointing policy, with and without fused
attention and fused AdamW, once. tune then gets a fifth of that time, twice: from what `auto`
chooses, and from a recipe that states one row. In the end, the best two settings of the grid and
what tune found are measured again, in alternation. Writes benchmarks/results/tune.json and .md.
Takes about 15 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from main_job import RESULTS, commit, spread

import flatout
from flatout.config.schema import RunConfig, load_config
from flatout.hardware import probe
from flatout.measure.resolving import resolve_here
from flatout.measure.spec import TrialResult, TrialSpec
from flatout.measure.sweep import filling
from flatout.measure.trial import run_trial
from flatout.measure.tune import run_tune
from flatout.measure.tune_space import Setting, rows_ladder

OVERRIDES = (
    "model.num_layers=4",
    "model.d_model=128",
    "model.num_heads=4",
    "data.seq_len=128",
    "batch.tokens_per_step=4096",
    "train.steps=100000",
    "train.device=cpu",
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="of the final comparison")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measured steps per trial")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder))
        config = load_config(None, [*OVERRIDES, f"data.path={data}"])
        found = measure(config, Path(folder), options.seconds, options.repeats)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tune.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "tune.md").write_text(table(found))
    print(table(found))


def prepare(folder: Path) -> Path:
    """Prepare Python's own standard library as characters."""
    text = folder / "text.txt"
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    text.write_text("".join(file.read_text(errors="replace") for file in files[:60]))
    flatout.prepare([str(text)], folder / "data", tokenizer="char", split="tail 0.1")
    return folder / "data"


def measure(config: RunConfig, folder: Path, seconds: float, repeats: int) -> dict:
    """Measure the grid, then tune, then all winners in alternation."""
    began_s = time.perf_counter()
    grid = {
        setting: rate_of(config, setting, 0, folder, seconds) for setting in settings_of(config)
    }
    grid_s = time.perf_counter() - began_s
    starts = {"auto": config, "1 row": config.with_values({"batch.rows_per_device": 1})}
    tuned, tune_s, num_trials = {}, {}, {}
    for name, start in starts.items():
        began_s = time.perf_counter()
        result, _ = run_tune(
            start, out=folder / f"{len(tuned)}.yaml", minutes=SHARE * grid_s / 60, only=ONLY
        )
        tune_s[name] = time.perf_counter() - began_s
        num_trials[name] = len(result.trials)
        best = result.best
        tuned[name] = Setting(best.rows_per_device, best.prefetch, frozenset(best.speedups))
        print(f"tune from {name}: {described(tuned[name])}", flush=True)
    top = sorted(grid, key=lambda setting: -grid[setting])[:2]
    rates: dict[Setting, list[float]] = {setting: [] for setting in (*top, *tuned.values())}
    for number in range(1, repeats + 1):
        for setting in rates:
            rates[setting].append(rate_of(config, setting, number, folder, seconds))
    best_of_grid = max(top, key=lambda setting: statistics.median(rates[setting]))
    return {
        "machine": probe().describe(),
        "commit": commit(),
        "repeats": repeats,
        "grid_trials": len(grid),
        "grid_s": grid_s,
        "grid": [{"setting": described(each), "tokens_per_s": grid[each]} for each in grid],
        "best_of_grid": {"setting": described(best_of_grid), "rates": rates[best_of_grid]},
        "tuned": [
            {
                "start": name,
                "setting": described(setting),
                "rates": rates[setting],
                "seconds": tune_s[name],
                "trials": num_trials[name],
            }
            for name, setting in tuned.items()
        ],
    }


def settings_of(config: RunConfig) -> list[Setting]:
    """Return the settings of the grid: those that tune can reach with ONLY."""
    resolved = resolve_here(config)
    fixed = {*resolved.speedups} - {*filling("micro_batch"), *SWITCHES}
    sequences = (resolved.config.batch.tokens_per_step or 0) // resolved.config.data.seq_len
    rows = rows_ladder(int(resolved.config.batch.rows_per_device), sequences)
    switches = itertools.product(*([name, None] for name in SWITCHES))
    return [
        Setting(count, config.data.prefetch, frozenset({*fixed, policy, *on} - {None}))
        for count, policy, on in itertools.product(rows, POLICIES, list(switches))
    ]


def rate_of(
    config: RunConfig, setting: Setting, number: int, folder: Path, seconds: float
) -> float:
    """Return the tokens per second of one trial; 0 for one that failed."""
    keys = setting.values(config.batch.tokens_per_step or 0)
    spec = TrialSpec(
        config=config.with_values(keys | {"train.seed": number}).to_dict(),
        folder=tempfile.mkdtemp(dir=folder),
        seconds=seconds,
        loss_steps=0,
        warmup_s=6.0,
    )
    result: TrialResult = run_trial(spec, TIMEOUT_S)
    print(f"{described(setting)}: {result.tokens_per_s or result.reason}", flush=True)
    return result.tokens_per_s or 0.0


def described(setting: Setting) -> str:
    """Return the setting as the table shows it."""
    policy = next((name for name in POLICIES if name in setting.speedups), "no checkpointing")
    rows = f"{setting.rows} row{'s' if setting.rows > 1 else ''}"
    on = [name for name in SWITCHES if name in setting.speedups]
    return ", ".join([rows, str(policy), *on])


def table(found: dict) -> str:
    """Return the figures as Markdown."""
    best = found["best_of_grid"]
    best_rate = statistics.median(best["rates"])
    lines = [
        "| | setting | tokens/s | of the grid's best | trials | seconds |",
        "|---|---|---|---|---|---|",
        f"| grid | {best['setting']} | {spread(best['rates'], 0)} | | {found['grid_trials']} | "
        f"{found['grid_s']:.0f} |",
    ]
    shares = []
    for row in found["tuned"]:
        shares.append(statistics.median(row["rates"]) / best_rate)
        lines.append(
            f"| tune from {row['start']} | {row['setting']} | {spread(row['rates'], 0)} | "
            f"{shares[-1]:.0%} | {row['trials']} | {row['seconds']:.0f} |"
        )
    kept = "kept" if min(shares) >= WITHIN else "**missed**"
    lines += [
        "",
        (
            f"Target: at least {WITHIN:.0%} of the grid's best in a fifth of its time: {kept}. "
            f"{found['machine']}; 4 layers, width 128, 128 tokens, 4,096 tokens per step; "
            f"{found['repeats']} repeats of the best settings in alternation; median (smallest to "
            f"largest); commit {found['commit']}; `python benchmarks/tune.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
