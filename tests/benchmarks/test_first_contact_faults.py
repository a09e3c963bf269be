"""The kit on a bare machine: from `git archive`, without git, and killed at random moments."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NANOGPT = """
    import torch
    from dataclasses import dataclass

    @dataclass
    class GPTConfig:
        block_size: int
        vocab_size: int
        n_layer: int
        n_head: int
        n_embd: int
        dropout: float
        bias: bool

    class GPT(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.embedding = torch.nn.Embedding(config.vocab_size, config.n_embd)
            self.head = torch.nn.Linear(config.n_embd, config.vocab_size)

        def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
            return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)

        def forward(self, idx, targets):
            logits = self.head(self.embedding(idx))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return logits, loss
"""


def extracted(folder):
    """Extract the tree of the last commit into a new directory, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        tree.extractall(folder, filter="data")
    return folder


def rows_of(results):
    path = results / "throughput.json"
    return json.loads(path.read_text())["measurements"] if path.exists() else []


def figures(results):
    return {
        (row["work"], row["entry"], row["round"]): row["tokens_per_s"]
        for row in rows_of(results)
        if row["status"] == "ok"
    }


def start(folder, call, *, python, site, nanogpt, only):
    """Start a call in a fresh tree, seeded with the results so far."""
    tree = extracted(folder / "tree")
    environment = {
        "PATH": str(folder),
        "HOME": str(folder),
        "PYTHONPATH": f"{site}:{tree}",
        "OMP_NUM_THREADS": "1",
    }
    words = ["--call", call, "--tiny", "--seed", folder / "carried", "--results", folder / "out"]
    words += ["--commit", "abc", "--only", only, "--nanogpt", nanogpt]
    with (folder / "log").open("w+") as err:
        return subprocess.Popen(
            [python, "benchmarks/first_contact.py", *map(str, words)],
            cwd=tree,
            env=environment,
            stderr=err,
            start_new_session=True,
        )


def finishes(process, seconds, log):
    """Wait for a call, kill it after `seconds`, and return whether it finished."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    assert process.returncode == 0, log.read_text()
    return True


def kill_and_carry(
    folder, *, nanogpt, python=sys.executable, site="", seconds=(3, 60), kills=6, only="*", seed=0
):
    """Make the first three calls at toy shapes, each in a fresh tree with the earlier results.

    The first `kills` processes are killed at random moments.

    Returns: the directory of the last results, and the stderr of each call's last process.
    """
    chance, carried, out = random.Random(seed), folder / "carried", folder / "out"
    known, logs = {}, []
    for call in ("1", "2", "3"):
        ended = False
        while not ended:
            shutil.rmtree(out, ignore_errors=True)
            process = start(folder, call, python=python, site=site, nanogpt=nanogpt, only=only)
            limit_s = chance.uniform(*seconds) if kills else None
            ended = finishes(process, limit_s, folder / "log")
            kills -= not ended
            now = figures(out)
            assert known.items() <= now.items() or not out.exists(), "a measurement was lost"
            if out.exists():
                assert len(list(out.iterdir())) <= 8
                shutil.rmtree(carried, ignore_errors=True)
                shutil.copytree(out, carried)
                known = now
            state = "finished" if ended else "killed"
            print(f"call {call}: {state}, {len(known)} measurements", flush=True)
        logs.append((folder / "log").read_text())
    return carried, logs


@pytest.mark.faults
def test_killed_calls_lose_no_measurement_and_finish(tmp_path):
    nanogpt = tmp_path / "nanoGPT"
    nanogpt.mkdir()
    (nanogpt / "model.py").write_text(textwrap.dedent(NANOGPT))
    results, logs = kill_and_carry(tmp_path, nanogpt=nanogpt)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from throughput_entries import ENTRIES

    held = {(row["work"], row["entry"]) for row in rows_of(results)}
    core = ("set", "nanogpt", "recipe", "fft", "people")
    missing = [
        f"{e.work}/{e.name}"
        for e in ENTRIES
        if e.name in core
        and (e.work, e.name) not in held
        and f"{e.work}/{e.name} is skipped" not in logs[-1]
    ]
    assert missing == []
    assert [row["reason"] for row in rows_of(results) if row["status"] == "failed"] == []
    contact = json.loads((results / "contact.json").read_text())
    assert set(contact["profiles"]) == {"gpt2-124m/set", "eigenstate-small-32k/set"}
    assert {"environment", "tests"} <= set(contact)
