"""The throughput benchmark runs at toy shapes, resumes, and never loses a measurement."""

from __future__ import annotations

import importlib
import importlib.util
import json
import runpy
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flatout.hardware import Gpu, probe
from flatout.registry import SPEEDUPS

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"
H200 = replace(probe(), gpus=(Gpu("NVIDIA H200", 139.0, (9, 0), "580"),))
NANOGPT = """
    from dataclasses import dataclass
    import torch
    from torch import nn
    from torch.nn import functional as F

    @dataclass
    class GPTConfig:
        block_size: int = 8
        vocab_size: int = 8
        n_layer: int = 1
        n_head: int = 1
        n_embd: int = 8
        dropout: float = 0.0
        bias: bool = True

    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
            self.shared = nn.Parameter(torch.ones(config.n_embd))
            self.head = nn.Linear(config.n_embd, config.vocab_size)

        def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
            return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)

        def forward(self, idx, targets):
            logits = self.head(self.shared + 0.1 * self.embedding(idx))
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
"""
"""The parts of nanoGPT that the benchmark calls."""


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("throughput")


@pytest.fixture
def worker(benchmark):
    before = torch.get_float32_matmul_precision()
    yield importlib.import_module("throughput_worker")
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def nanogpt(tmp_path):
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    (folder / "model.py").write_text(textwrap.dedent(NANOGPT))
    return folder


@pytest.fixture
def on_gpu(benchmark, monkeypatch, tmp_path):
    """A fake machine with a GPU, whose figures follow from the requested configuration."""
    monkeypatch.setattr(benchmark, "probe", lambda: H200)
    monkeypatch.setattr(benchmark, "random_data", lambda folder, **_: folder)
    monkeypatch.setattr(benchmark, "text_data", lambda folder, **_: folder)
    specs = []

    def measured(spec, timeout_s):
        specs.append(spec)
        rate = 1e5 + 100 * (spec["rows"] or 0) + spec["config"]["train"]["seed"]
        row = {
            "tokens_per_s": rate,
            "peak_gib": 10.0,
            "mfu": 0.5,
            "roof_tflops": 790.0,
            "steps_ms": [1.0],
            "speedups": [],
        }
        return {"status": "ok", "reason": None, **row}

    monkeypatch.setattr(benchmark, "run_apart", measured)
    return specs


def written(out):
    return json.loads((out / "throughput.json").read_text())


ONE_OF_EACH = (
    "gpt2-124m/recipe,gpt2-124m/n*,gpt2-124m/people,gpt2-124m/hugging*,gpt2-124m-fast/set,"
    "gpt2-124m-32k/nanogpt,eigenstate*/set,eigenstate*/fft"
)


def test_toy_shapes_are_trained(benchmark, worker, nanogpt, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "run_apart", lambda spec, timeout_s: worker.measured(spec))
    monkeypatch.setattr(
        benchmark,
        "text_data",
        lambda folder, *, vocabulary, **_: benchmark.random_data(
            folder, tokens=8192, vocabulary=vocabulary
        ),
    )
    out = tmp_path / "out"
    benchmark.main(["--tiny", "--only", ONE_OF_EACH, "--out", str(out), "--nanogpt", str(nanogpt)])
    rows = written(out)["measurements"]
    assert [row["reason"] for row in rows if row["status"] != "ok"] == []
    measured = {(row["work"], row["entry"]) for row in rows}
    requested = {
        (entry.work, entry.name)
        for entry in benchmark.ENTRIES
        if benchmark.is_selected(entry, ONE_OF_EACH)
    }
    absent = {("gpt2-124m", peer) for peer in ("huggingface", "huggingface-compiled", "nanochat")}
    assert requested - absent <= measured
    for row in rows:
        assert row["losses"][-1] < row["losses"][0]
        assert row["mfu"] > 0
        tokens = 64 if "32k" in row["work"] else 32
        assert row["tokens_per_step"] == row["rows_per_device"] * row["accumulate"] * tokens
    text = (out / "throughput.md").read_text()
    assert "say nothing about speed" in text
    assert "batch 1" not in text[text.index("tokens/s | MFU") :], "toy shapes use another batch"
    assert "kept" not in text


def test_every_entry_has_a_configuration_at_toy_shapes(
    benchmark, nanogpt, monkeypatch, tmp_path, capsys
):
    specs = []
    monkeypatch.setattr(benchmark, "random_data", lambda folder, **_: folder)
    monkeypatch.setattr(benchmark, "text_data", lambda folder, **_: folder)
    monkeypatch.setattr(
        benchmark,
        "run_apart",
        lambda spec, timeout_s: specs.append(spec) or {"status": "failed", "reason": "not tried"},
    )
    benchmark.main(["--tiny", "--nanogpt", str(nanogpt), "--out", str(tmp_path)])
    output = capsys.readouterr().err
    measured = {(row["work"], row["entry"]) for row in written(tmp_path)["measurements"]}
    for entry in benchmark.ENTRIES:
        assert (
            entry.work,
            entry.name,
        ) in measured or f"{entry.work}/{entry.name} is skipped" in output
    assert len(specs) == len(measured)
    assert {spec["config"]["data"]["seq_len"] for spec in specs} == {32, 64}


def test_a_measurement_runs_in_its_own_process(benchmark, tmp_path, capsys):
    benchmark.main(["--tiny", "--only", "gpt2-124m/people", "--out", str(tmp_path)])
    (row,) = written(tmp_path)["measurements"]
    assert (row["status"], len(row["steps_ms"]), len(row["losses"])) == ("ok", 8, 10)


def test_without_a_gpu_real_shapes_are_refused(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "probe", lambda: replace(probe(), gpus=()))
    with pytest.raises(SystemExit, match="--tiny"):
        benchmark.main([])


def test_every_batch_is_tried_once_and_the_best_are_repeated(benchmark, on_gpu, tmp_path, capsys):
    benchmark.main(["--only", "gpt2-124m/set", "--out", str(tmp_path)])
    tried = [(row["round"], row["rows"]) for row in written(tmp_path)["measurements"]]
    assert tried == [(0, 64), (0, 128), (0, 32), (1, 128), (2, 128)]
    batch = on_gpu[0]["config"]["batch"]
    assert (batch["rows_per_device"], batch["accumulate"], batch["tokens_per_step"]) == (
        64,
        1,
        64 * 1024,
    )
    assert (on_gpu[0]["warmup_steps"], on_gpu[0]["steps"]) == (8, 20)
    assert "+compile" in on_gpu[0]["config"]["speedups"]


def test_entries_take_turns_and_finished_ones_are_not_repeated(benchmark, on_gpu, tmp_path, capsys):
    benchmark.main(
        [
            "--only",
            "gpt2-124m/set,gpt2-124m/people,gpt2-124m/recipe",
            "--out",
            str(tmp_path),
            "--rounds",
            "2",
        ]
    )
    order = [(row["round"], row["entry"]) for row in written(tmp_path)["measurements"]]
    assert [entry for _, entry in order[:5]] == ["recipe", "set", "people", "set", "set"]
    assert {entry for number, entry in order if number == 1} == {"set", "people", "recipe"}
    count = len(on_gpu)
    benchmark.main(["--only", "gpt2-124m/set", "--out", str(tmp_path), "--rounds", "2"])
    assert len(on_gpu) == count
    benchmark.main(["--only", "gpt2-124m/set", "--out", str(tmp_path), "--rounds", "1", "--again"])
    assert len(on_gpu) == count + 3
    assert len([row for row in written(tmp_path)["measurements"] if row["entry"] == "people"]) == 2


def test_other_code_is_measured_again_except_peers(
    benchmark, on_gpu, monkeypatch, tmp_path, capsys
):
    only = ["--only", "gpt2-124m/recipe,gpt2-124m/people", "--out", str(tmp_path), "--rounds", "1"]
    benchmark.main(only)
    before = benchmark.code_digest
    monkeypatch.setattr(
        benchmark, "code_digest", lambda *, ours: "other" if ours else before(ours=False)
    )
    benchmark.main(only)
    assert [spec["kind"] for spec in on_gpu] == ["flatout", "people", "flatout"]
    assert "gpt2-124m/recipe: 1 measurements of other code" in capsys.readouterr().err


def test_no_measurement_starts_that_would_not_end_in_time(benchmark, on_gpu, tmp_path, capsys):
    benchmark.main(["--only", "gpt2-124m/set", "--out", str(tmp_path), "--minutes", "0.5"])
    assert on_gpu == []
    assert "3 measurements left" in capsys.readouterr().err


def test_a_measurement_cut_short_by_the_time_limit_is_repeated(
    benchmark, on_gpu, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(
        benchmark,
        "run_apart",
        lambda spec, timeout_s: {"status": "timed-out", "reason": "It had not ended."},
    )
    benchmark.main(["--only", "gpt2-124m/people", "--out", str(tmp_path), "--minutes", "3"])
    assert written(tmp_path)["measurements"] == []
    benchmark.main(["--only", "gpt2-124m/people", "--out", str(tmp_path)])
    assert [row["status"] for row in written(tmp_path)["measurements"]] == ["timed-out"]
    assert "timed-out: It had not ended." in (tmp_path / "throughput.md").read_text()


def test_toy_figures_do_not_mix_with_real_ones(benchmark, on_gpu, tmp_path):
    benchmark.main(["--only", "gpt2-124m/people", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="contains real shapes"):
        benchmark.main(["--tiny", "--out", str(tmp_path)])


def test_skipped_entries_are_reported(benchmark, on_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(type(SPEEDUPS), "names", lambda self: ["compile", "bf16"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    benchmark.main(
        [
            "--only",
            "gpt2-124m/set*,gpt2-124m/nano*,gpt2-124m/hugg*",
            "--out",
            str(tmp_path),
            "--rounds",
            "1",
        ]
    )
    output = capsys.readouterr().err
    assert output.count("There is no speedup liger-ce: it is omitted.") == 1
    assert "gpt2-124m/set-cuda-graphs is skipped: it tests cuda-graphs." in output
    assert (
        "gpt2-124m/huggingface is skipped: huggingface is missing. "
        "To add it: pip install transformers." in output
    )
    assert {row["entry"] for row in written(tmp_path)["measurements"]} == {
        "set",
        "set-bias",
        "set-fp32-stream",
    }


@pytest.mark.parametrize(
    "part",
    [path.name for path in [*FOLDER.glob("throughput_*.py"), FOLDER / "optimisers_report.py"]],
)
def test_a_part_run_as_a_script_names_the_command(part, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / part), run_name="__main__")
    command = f"benchmarks/{part.partition('_')[0]}.py"
    assert ended.value.code == f"This file belongs to {command}; run: python {command} --help"
    assert capsys.readouterr() == ("", "")
