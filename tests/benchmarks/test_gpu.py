"""The list of GPU steps: each becomes one line, and the same command continues."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace

import pytest

from flatout import Dataset
from flatout.config.registry import RECIPES, SPEEDUPS
from flatout.hardware.machine import probe


@pytest.fixture
def gpu(benchmark, monkeypatch, tmp_path):
    module = benchmark
    monkeypatch.setattr(module, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "probe", lambda: replace(probe(), gpus=()))
    return module


@pytest.fixture
def rows(tmp_path):
    """Return the rows of the results by step."""

    def read(folder=tmp_path / "out"):
        lines = (folder / "results.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines)}

    return read


@pytest.fixture
def programs(gpu, monkeypatch):
    """Replace the steps with small programs, by name."""

    def replaced(**programs):
        steps = {name: gpu.Step("?", ("-c", code), 1.0) for name, code in programs.items()}
        monkeypatch.setattr(gpu, "STEPS_IN_ORDER", steps)

    return replaced


def test_every_step_is_known_here(gpu):
    """Its recipe, its speedups and the step it is compared with exist."""
    for name, step in gpu.STEPS_IN_ORDER.items():
        speedups = " ".join(step.words).partition("speedups=")[2].split(" ")[0]
        wanted = re.findall(r"[+-]([a-z][a-z0-9-]+)(?=,|$)", speedups)
        assert {*wanted} <= {*SPEEDUPS.names()}
        assert step.against in {None, *gpu.STEPS_IN_ORDER}
        assert name.partition("/")[0] in RECIPES.names() or "/" not in name


def test_without_a_gpu_every_step_is_a_skipped_line(gpu, rows, tmp_path):
    gpu.main(["--out", str(tmp_path / "out")])
    assert list(rows()) == list(gpu.STEPS_IN_ORDER)
    assert {row["status"] for row in rows().values()} == {"skipped"}
    assert "| tests |" in (tmp_path / "out" / "table.md").read_text()


def test_every_outcome_of_a_process_becomes_a_row(gpu, programs, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST_LIMIT_S", 5.0)
    programs(
        good='print("noise"); print(\'{"tokens_per_s": 5.0}\')',
        silent="",
        crash='print("using a GPU"); raise ValueError("no luck")',
        killed="import os; os.kill(os.getpid(), 9)",
        refused='print(\'{"error": "too large"}\'); raise SystemExit(2)',
        untrained="print('{\"train_loss\": 6.3}')",
        slow="import time; time.sleep(60)",
    )
    gpu.main(["--out", str(tmp_path / "out"), "--tiny"])
    found = rows()
    statuses = {name: row["status"] for name, row in found.items()}
    assert statuses.pop("good") == "ok"
    assert statuses.pop("slow") == "timed-out"
    assert set(statuses.values()) == {"failed"}
    assert found["good"]["figures"] == {"tokens_per_s": 5.0}
    assert found["crash"]["reason"].endswith("ValueError: no luck")
    assert found["refused"]["reason"] == "too large"
    assert found["untrained"]["reason"] == "It does not train: its loss is 6.300."
    assert "Traceback" in (tmp_path / "out" / "output.txt").read_text()


def test_a_command_continues_where_an_earlier_one_ended(gpu, programs, rows, tmp_path):
    out, count = tmp_path / "out", tmp_path / "count"
    note = f'open({str(count)!r}, "a").write("x"); print("{{}}")'
    programs(one=note, two="import time; time.sleep(60)", three=note)
    gpu.main(["--out", str(out), "--tiny", "--minutes", "0.05"])
    assert (rows()["two"]["status"], "three" in rows()) == ("stopped", False)
    with (out / "results.jsonl").open("a") as file:
        file.write('{"step": "torn')
    programs(one=note, two=note, three=note)
    elsewhere = tmp_path / "elsewhere"
    words = ["--out", str(elsewhere), "--tiny", "--earlier", str(out / "results.jsonl")]
    gpu.main(words)
    assert {row["status"] for row in rows(elsewhere).values()} == {"ok"}
    assert count.read_text() == "xxx"
    gpu.main([*words, "--again", "t*"])
    assert count.read_text() == "xxxxx"


def test_no_step_starts_that_would_end_too_late(gpu, programs, rows, tmp_path, monkeypatch):
    programs(long='print("{}")')
    monkeypatch.setattr(gpu, "probe", lambda: argparse.Namespace(gpus=["a GPU"]))
    gpu.main(["--out", str(tmp_path / "out"), "--minutes", "0.01"])
    assert rows() == {}


def test_numbers_are_compared_with_predictions_for_this_gpu(gpu, monkeypatch):
    rows = {
        "environment": {"figures": {"matmul_tflops": gpu.H200_TFLOPS / 2}},
        "theirs": {"figures": {"tokens_per_s": 40.0}},
        "ours": {
            "figures": {
                "tokens_per_s": 60.0,
                "peak_gib": 11.0,
            }
        },
    }
    step = gpu.Step(
        "?",
        (),
        1.0,
        expected={"tokens_per_s": (90.0, 110.0)},
        target={"tokens_per_s": 130.0, "times": 1.4, "peak_gib": 10.5},
        against="theirs",
    )
    monkeypatch.setattr(gpu, "STEPS_IN_ORDER", {"ours": step})
    found = gpu.compared("ours", rows)
    assert found["predicted"]["tokens_per_s"] == (45.0, 55.0)
    assert found["off_by"] == {
        "tokens_per_s": 0.2,
    }
    assert found["times"] == 1.5
    assert found["kept"] == {"tokens_per_s": False, "times": True, "peak_gib": False}


@pytest.mark.slow
def test_steps_run_at_toy_shapes(gpu, rows, tmp_path):
    """One of each kind that needs no other package."""
    (tmp_path / "model.py").write_text(
        """
import torch
from torch import nn
from types import SimpleNamespace as GPTConfig

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, tokens, targets):
        logits = self.head(self.embedding(tokens))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=30 * lr, betas=betas)
"""
    )
    wanted = "environment,gpt2-124m/set,gpt2-124m/people,gpt2-124m/nanogpt,eigenstate-small-32k/fft"
    words = ["--tiny", "--only", wanted, "--nanogpt", str(tmp_path)]
    gpu.main(["--out", str(tmp_path / "out"), *words])
    found = rows()
    assert {row["status"] for row in found.values()} == {"ok"}, found
    assert found["environment"]["figures"]["matmul_tflops"] > 0
    for name in wanted.split(",")[1:]:
        assert found[name]["figures"]["tokens_per_s"] > 0
        assert found[name]["figures"]["train_loss"] < 6.2
    data = Dataset.open(tmp_path / "scratch" / "random-tiny")
    assert (data.split("train").num_tokens, data.vocab_size) == (1 << 15, 512)
