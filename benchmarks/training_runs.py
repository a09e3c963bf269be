"""Small training runs in a benchmark's own process, and the version of their code."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from measurement import RESULTS, json_lines

from flatout import Dataset
from flatout.assembly.resolve import resolve
from flatout.assembly.run import Run, build
from flatout.config.schema import RunConfig
from flatout.distributed.mesh import make_mesh
from flatout.hardware.machine import probe
from flatout.training.evaluation import score
from flatout.training.step import train_step


@functools.cache
def code_state(root: Path = RESULTS.parents[1]) -> str:
    """Return the commit that last changed the code of a run.

    `+` and a digest follow if those files have changed since.
    """
    files = ("flatout", "benchmarks/optimisers.py", "benchmarks/training_runs.py")

    def git(*words: str) -> list[str]:
        done = subprocess.run(
            ["git", *words, "--", *files], capture_output=True, text=True, cwd=root, check=True
        )
        return done.stdout.splitlines()

    (commit,) = git("log", "-1", "--format=%h")
    if not git("status", "--porcelain", "--untracked-files=all"):
        return commit
    digest = hashlib.sha256()
    for name in sorted({*git("ls-files"), *git("ls-files", "--others", "--exclude-standard")}):
        path = root / name
        file_digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
        digest.update(f"{name} {file_digest}\n".encode())
    return f"{commit}+{digest.hexdigest()[:8]}"


def built(config: RunConfig, dataset: Dataset, folder: Path = Path("unused")) -> Run:
    """Return the run that a config describes, in this process."""
    machine = probe()
    resolved, decisions = resolve(config, machine=machine, dataset=dataset, world_size=1)
    mesh = make_mesh(resolved.parallel, "cpu")
    given = {"machine": machine, "mesh": mesh, "dataset": dataset, "decisions": decisions}
    return build(resolved, folder=folder, **given)


def trained(run: Run, eval_tokens: int | None) -> dict[str, Any]:
    """Train a run to its end; return its validation and training loss, None when it diverged.

    The training loss is the mean over the last twentieth of the steps.
    """
    losses = []
    for batch in run.loader:
        losses.append(float(train_step(run, batch).loss))
        run.step += 1
        if run.step == run.last_step or not math.isfinite(losses[-1]):
            break
    run.loader.close()
    val_loss = score(run, max_tokens=eval_tokens).loss
    if not math.isfinite(losses[-1]) or not math.isfinite(val_loss):
        return {"val_loss": None, "train_loss": None}
    return {
        "val_loss": val_loss,
        "train_loss": statistics.mean(losses[-max(1, len(losses) // 20) :]),
    }


def remembered(
    key: dict[str, Any], cache: Path, run: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of a run, from the cache if this code has run it before."""
    key = json.loads(json.dumps({**key, "code": code_state()}))
    for known in json_lines(cache) if cache.exists() else ():
        if known["key"] == key:
            return known["found"]
    found = run()
    with cache.open("a") as file:
        file.write(json.dumps({"key": key, "found": found}) + "\n")
    print(key, found, file=sys.stderr, flush=True)
    return found


def loss_of(row: dict[str, Any]) -> float:
    """Return the validation loss of a run, or infinity if it diverged."""
    return math.inf if row["val_loss"] is None else float(row["val_loss"])


def best_of_grid(
    rates: Iterable[float], run: Callable[[float], dict[str, Any]]
) -> tuple[float, list[dict[str, Any]]]:
    """Run learning rates, and more by factors of two until the best is inside the grid.

    Returns the best rate and the rows of all runs.
    """
    rows = {rate: run(rate) for rate in rates}
    while True:
        best = min(rows, key=lambda rate: loss_of(rows[rate]))
        if min(rows) < best < max(rows):
            return best, [*rows.values()]
        rate = best / 2 if best == min(rows) else best * 2
        rows[rate] = run(rate)
