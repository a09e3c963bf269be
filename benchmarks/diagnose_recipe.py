"""Plants faults in flatout's own training, for `flatout diagnose RECIPE` to find.

Each trial runs the command as a user does. A slow source is planted by a `sitecustomize.py`, which
Python imports at its start; the other faults are settings of the recipe or of the environment.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

FAULTS = {
    "recipe: slow source": "slow-data",
    "recipe: slow save": "slow-save",
    "recipe: needless evaluation": "frequent-evaluation",
    "recipe: CPU thread cap": "cpu-threads",
}
"""Finding that should name each fault."""
CPU_ONLY = ("recipe: CPU thread cap",)
HEALTHY = "recipe: healthy"
TOKENS_PER_STEP = 4096
RECIPE = """\
model: {num_layers: 4, d_model: 128, num_heads: 2}
data: {path: data, seq_len: 64}
batch: {tokens_per_step: 4096}
train: {steps: 3000}
checkpoint: {every_minutes: 10}
speedups: auto,-compile
"""
SLOW_SOURCE = """\
import time
from flatout.data.load.batches import ShardReader

plain = ShardReader.read


def read(self, *arguments):
    time.sleep({seconds})
    return plain(self, *arguments)


ShardReader.read = read
"""
TIMEOUT_S = 300


class Recipe:
    """A small recipe with its data; the first trial measures the time of a healthy step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step_s: float | None = None
        (folder / "recipe.yaml").write_text(RECIPE)
        words = random.Random(0).choices(["to ", "be ", "or ", "not ", "that ", "is "], k=500_000)
        (folder / "text.txt").write_text("".join(words))
        prepare = ["prepare", "text.txt", "--out", "data", "--tokenizer", "char", "--split"]
        flatout([*prepare, "tail 0.1"], folder, os.environ)

    def trial(self, fault: str, strength: int) -> dict:
        """Run one trial, and return what the diagnosis found."""
        row: dict = {"fault": fault, "strength": strength}
        try:
            if self._step_s is None:
                self._step_s = flatout(["diagnose", "recipe.yaml"], self._folder, os.environ)[
                    "step_s"
                ]
            with tempfile.TemporaryDirectory() as start:
                overrides, environment = planted(fault, strength, self._step_s, Path(start))
                found = flatout(
                    ["diagnose", "recipe.yaml", *overrides], self._folder, os.environ | environment
                )
        except (subprocess.TimeoutExpired, RuntimeError) as error:
            return row | {"error": str(error)}
        return row | {
            "findings": [finding["name"] for finding in found["findings"]],
            "verdict": found["verdict"],
            "shares": found["shares"],
            "step_ms": 1e3 * (found["step_s"] or 0.0),
        }


def planted(
    fault: str, strength: int, step_s: float, start: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the overrides and environment variables of a fault."""
    number = strength - 1
    if fault == "recipe: slow source":  # the reader works ahead: it must take longer than a step
        seconds = step_s * (1.5, 2, 3)[number]
        (start / "sitecustomize.py").write_text(SLOW_SOURCE.format(seconds=seconds))
        paths = [str(start), *filter(None, [os.environ.get("PYTHONPATH")])]
        return [], {"PYTHONPATH": os.pathsep.join(paths)}
    if fault == "recipe: slow save":
        every = f"checkpoint.every_steps={(4, 2, 1)[number]}"
        return [
            every,
            "checkpoint.every_minutes=null",
            "speedups=auto,-compile,-async-checkpoints",
        ], {}
    if fault == "recipe: needless evaluation":
        tokens = int(TOKENS_PER_STEP * (1.5, 3, 6)[number])
        return ["train.eval_every=1", f"train.eval_tokens={tokens}"], {}
    if fault == "recipe: CPU thread cap":
        return [f"batch.tokens_per_step={TOKENS_PER_STEP * strength}"], {"OMP_NUM_THREADS": "1"}
    return [], {}


def flatout(arguments: list[str], folder: Path, environment: dict[str, str]) -> dict:
    """Run a flatout command in a folder, and return the fields of --json.

    Raises: RuntimeError when it fails; TimeoutExpired.
    """
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *arguments, "--json"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return json.loads(done.stdout.splitlines()[-1])
