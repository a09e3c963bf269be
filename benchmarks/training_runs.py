"""Small training runs in a benchmark's own process, and the version of their code."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
import subprocess
from pathlib import Path
from typing import Any

from main_job import RESULTS

from flatout import Dataset
from flatout.assembly.resolve import resolve
from flatout.assembly.run import Run, build
from flatout.config.schema import RunConfig
from flatout.hardware import probe
from flatout.parallel.mesh import make_mesh
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


def built(config: RunConfig, dataset: Dataset) -> Run:
    """Return the run that a config describes, in this process."""
    machine = probe()
    resolved, decisions = resolve(config, machine=machine, dataset=dataset, world_size=1)
    mesh = make_mesh(resolved.parallel, "cpu")
    return build(
        resolved,
        machine=machine,
        mesh=mesh,
        dataset=dataset,
        folder=Path("unused"),
        decisions=decisions,
    )


def trained(run: Run, eval_tokens: int | None) -> dict[str, Any]:
    """Train a run to its end; return its validation and training loss, None when it diverged.

    The training loss is the mean over the last twentieth of the steps.
    """
    losses = []
    for batch in run.feed:
        losses.append(float(train_step(run, batch).loss))
        run.step += 1
        if run.step == run.last_step or not math.isfinite(losses[-1]):
            break
    run.feed.close()
    val_loss = score(run, max_tokens=eval_tokens).loss
    if not math.isfinite(losses[-1]) or not math.isfinite(val_loss):
        return {"val_loss": None, "train_loss": None}
    return {
        "val_loss": val_loss,
        "train_loss": statistics.mean(losses[-max(1, len(losses) // 20) :]),
    }
