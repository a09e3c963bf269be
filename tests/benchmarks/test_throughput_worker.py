"""A measurement runs in its own process, and each outcome becomes a row."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("throughput")


@pytest.fixture
def worker(benchmark):
    before = torch.get_float32_matmul_precision()
    yield importlib.import_module("throughput_worker")
    torch.set_float32_matmul_precision(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("print('no figures'); raise SystemExit(3)", "failed", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "exited with code -9"),
        ("import time; time.sleep(60)", "timed-out", "did not finish within 1 s"),
        ("print('noise'); print('{\"status\": \"ok\"}')", "ok", None),
    ],
)
def test_every_outcome_of_a_process_becomes_a_row(benchmark, program, status, reason):
    found = benchmark.run_apart(
        {}, 1.0 if status == "timed-out" else 60.0, command=[sys.executable, "-c", program]
    )
    assert found["status"] == status
    assert reason is None or reason in found["reason"]


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ([10.9, 10.8, 10.5, 10.4, 10.3], None),
        ([10.9] * 5, "failed"),
        ([10.9, float("nan"), 10.0], "failed"),
        ([10.0, 11.0, 12.0], "failed"),
    ],
)
def test_a_loss_that_does_not_fall_is_a_failure(worker, losses, status):
    assert worker.unless_it_trains(losses).get("status") == status


def test_an_error_becomes_a_row(worker, monkeypatch):
    def measure(error):
        def raises(spec):
            raise error

        monkeypatch.setattr(worker, "measure", raises)
        return worker.measured({})

    assert measure(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")) == {
        "status": "out-of-memory",
        "reason": "CUDA out of memory. Tried",
    }
    assert measure(RuntimeError("no\nmore")) == {"status": "failed", "reason": "RuntimeError: no"}


def test_flops_are_six_per_weight_plus_attention_within_the_window(worker, benchmark):
    config = benchmark.shape(benchmark.WORKS[0], tiny=False)
    matmul = 12 * 12 * 768**2 + 50304 * 768
    assert worker.flops_per_token(config) == pytest.approx(6 * matmul + 6 * 12 * 1025 * 768)


def test_steps_are_timed_from_start_to_start(worker, monkeypatch):
    marks = iter([0.0, 5.0, 6.0, 8.0, 11.0])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(marks))
    times = worker.StepTimes(torch.device("cpu"), 1, 3)
    assert [times.requested() for _ in range(5)] == [False, False, False, False, True]
    assert times.milliseconds() == [1000.0, 2000.0, 3000.0]


@pytest.mark.gpu
def test_steps_are_timed_on_the_device(worker):
    device = torch.device("cuda")
    times = worker.StepTimes(device, 1, 2)
    matrix = torch.randn(2048, 2048, device=device)
    while not times.requested():
        for _ in range(20):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
    assert len(times.milliseconds()) == 2
    assert min(times.milliseconds()) > 0
