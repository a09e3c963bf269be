"""Sets of the throughput benchmark, traced on a fake GPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
CUDA_BUILD = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a CUDA build of torch, and no GPU",
)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("fake_gpu")


@CUDA_BUILD
@pytest.mark.parametrize("name", ["gpt2-124m/set", "eigenstate-small-32k/recipe"])
def test_forward_and_backward_are_one_graph_each(name):
    done = subprocess.run(
        [sys.executable, FOLDER / "fake_gpu.py", "--only", name],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{name}: 2 graphs; " in done.stdout
    expected = "cudnn_attention_backward" if "gpt2" in name else "flatout.scan_backward"
    assert expected in done.stdout


def test_code_that_reads_values_back_is_not_traced(benchmark):
    assert benchmark.traced("gpt2-124m/set-liger-ce")["status"] == "not traced"


def test_without_a_cuda_build_the_error_names_the_requirement(benchmark, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "needs a CUDA build of torch" in benchmark.why_not()


def test_on_a_real_gpu_the_error_names_the_benchmark(benchmark, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "throughput.py" in benchmark.why_not()


def test_a_process_that_torch_aborted_is_a_failed_entry(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark.sys, "executable", "/bin/false")
    entry = benchmark.ENTRIES[0]
    found = benchmark.trace_apart(entry, {})
    assert benchmark.line(entry, found) == f"{entry.work}/{entry.name}: failed: no output"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            (
                "Traceback:\ntorch._dynamo.exc.Unsupported: a graph break\n  Hint: none\n\nSet"
                " TORCHDYNAMO_VERBOSE=1\n"
            ),
            "torch._dynamo.exc.Unsupported: a graph break",
        ),
        ("frame #0: main\nAborted: core dumped\nframe #1: start\n", "Aborted: core dumped"),
        ("", "no output"),
    ],
)
def test_the_reason_is_the_line_with_the_error(benchmark, output, reason):
    assert benchmark.reason_in(output) == reason
