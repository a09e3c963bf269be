"""The report picks the best batch, compares like with like, and checks targets per device."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.hardware import Gpu, probe

FOLDER = Path(__file__).parents[2] / "benchmarks"
H200 = replace(probe(), gpus=(Gpu("NVIDIA H200", 139.0, (9, 0), "580"),))


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("throughput")


def test_batches_near_the_best_are_repeated(benchmark):
    report = importlib.import_module("throughput_report")
    entry = next(
        entry for entry in benchmark.ENTRIES if (entry.work, entry.name) == ("gpt2-124m", "set")
    )
    rows = [(64, 97.5), (128, 100.0), (32, 96.0), (64, 98.5), (32, 97.5)]
    given = [
        {
            "work": entry.work,
            "entry": entry.name,
            "rows": batch,
            "status": "ok",
            "tokens_per_s": rate,
        }
        for batch, rate in rows
    ]
    assert report.best_rows(report.Measurements(given, tiny=False), entry) == [64, 128]


def test_targets_are_checked_against_the_best_of_flatout(benchmark, tmp_path):
    report = importlib.import_module("throughput_report")
    found = report.Measurements([], tiny=False)

    def add(entry, rows, number, rate, gib=10.0, work="gpt2-124m-32k", device="NVIDIA H200"):
        row = {
            "tokens_per_s": rate,
            "peak_gib": gib,
            "mfu": 0.5,
            "roof_tflops": 790.0,
            "steps_ms": [1.0],
            "speedups": [],
        }
        where = {
            "machine": "m",
            "device": device,
            "torch": "2",
            "commit": "abc",
            "status": "ok",
            "reason": None,
        }
        found.add({"work": work, "entry": entry, "rows": rows, "round": number, **row, **where})

    for number, (ours, theirs) in enumerate([(180e3, 170e3), (160e3, 150e3), (175e3, 200e3)]):
        add("set", 2, number, ours)
        add("nanogpt", 4, number, theirs)
    add("set", 4, 0, 300e3, gib=60.0)
    times, rate = (
        report.verdict(found, target) for target in report.TARGETS if target.work == "gpt2-124m-32k"
    )
    assert times["measured"] == pytest.approx(180 / 170)
    assert (times["kept"], times["by"]) == (True, "set, batch 2")
    assert (rate["measured"], rate["kept"], rate["aim_reached"]) == (300e3, None, True)
    add("set", 1, 0, 500e3, gib=13.5, work="eigenstate-small-32k")
    speed, against, memory = (
        report.verdict(found, target)
        for target in report.TARGETS
        if target.work == "eigenstate-small-32k"
    )
    assert (speed["kept"], against["kept"], memory["kept"]) == (False, None, False)
    text = report.table(found)
    assert (
        "| 600,000 | 680,000 | 565,000 to 585,000 | 500,000 | set, batch 1 | **missed**, aim not"
        " reached |" in text
    )
    assert "| **300,000** |" in text
    assert "not measured" in text


def row_of(entry, rate, *, device, roof_tflops, rows=64, work="gpt2-124m"):
    figures = {
        "tokens_per_s": rate,
        "peak_gib": 1.0,
        "mfu": 0.5,
        "roof_tflops": roof_tflops,
        "steps_ms": [1.0],
        "speedups": [],
    }
    where = {
        "machine": device,
        "device": device,
        "torch": "2",
        "commit": "abc",
        "status": "ok",
        "reason": None,
    }
    return {"work": work, "entry": entry, "rows": rows, "round": 0, **figures, **where}


def test_another_gpu_has_no_verdict_but_a_share_of_its_matmul_rate(benchmark):
    report = importlib.import_module("throughput_report")
    rows = [
        row_of("set", 295e3, device="NVIDIA A100", roof_tflops=395.0),
        row_of("nanogpt", 100e3, device="NVIDIA A100", roof_tflops=395.0),
    ]
    found = report.Measurements(rows, tiny=False)
    verdicts = [
        report.verdict(found, target) for target in report.TARGETS if target.work == "gpt2-124m"
    ]
    assert [(row["kept"], row["aim_reached"]) for row in verdicts] == [(None, None)] * len(verdicts)
    assert verdicts[0]["per_tflops"] == pytest.approx(1.0)
    text = report.table(found)
    assert (
        "not judged: the target is for an NVIDIA H200, this is the NVIDIA A100; per TFLOP/s of"
        " matrix products 1.00 of it |" in text
    )
    assert "kept" not in text
    assert "missed" not in text


def test_like_is_compared_with_like(benchmark, tmp_path):
    report = importlib.import_module("throughput_report")
    rates = {"set": 600e3, "set-bias": 500e3, "nanogpt": 500e3, "nanogpt-bias": 400e3}
    found = report.Measurements(
        [
            row_of(name, rate, device="NVIDIA H200", roof_tflops=790.0)
            for name, rate in rates.items()
        ],
        tiny=False,
    )
    measured = {
        target.against: report.verdict(found, target)["measured"]
        for target in report.TARGETS
        if target.work == "gpt2-124m"
    }
    assert measured["nanogpt"] == pytest.approx(600 / 500)
    assert measured["nanogpt-bias"] == pytest.approx(500 / 400)
    session = benchmark.Session(
        benchmark.parser().parse_args(["--nanogpt", str(tmp_path)]), H200, tmp_path, tmp_path
    )
    for work in benchmark.WORKS:
        shape = benchmark.shape(work, tiny=False)
        biases = {
            entry.name: session.available.config(entry, shape).model.own().get("bias", False)
            for entry in benchmark.ENTRIES
            if entry.work == work.name
            and entry.name in ("set", "set-bias", "nanogpt", "nanogpt-bias", "people", "none")
        }
        assert biases == {name: name.endswith("-bias") for name in biases}


def test_a_ratio_names_its_reference_and_its_batch(benchmark):
    report = importlib.import_module("throughput_report")
    rows = [
        row_of("people", 100.0, device="NVIDIA H200", roof_tflops=790.0, rows=1),
        row_of("set", 100.0, device="NVIDIA H200", roof_tflops=790.0),
    ]
    found = report.Measurements(rows, tiny=False)
    target = next(target for target in report.TARGETS if target.against == "people")
    assert (
        report.verdict(found, target)["what"]
        == "times as fast as a typical hand-written loop, no biases, batch 1"
    )
    assert report.wanted(target) == "times as fast as a typical hand-written loop, no biases"
