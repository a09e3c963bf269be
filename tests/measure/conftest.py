"""A report with every kind of row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout.measure.experiments.records import Figure, Row, Trial, TrialResult
from flatout.measure.experiments.report import Bench

sys.path.append(str(Path(__file__).parent))


def row(name, kind, rate, gain=None, **more):
    figures = {"tokens_per_s": Figure(median=rate, low=0.97 * rate, high=1.04 * rate)}
    figures |= {"step_ms": 300.0, "data_ms": 12.34, "host_ms": 0.456, "device_ms": 287.0}
    figures |= {"peak_gib": 0.36, "rows_per_device": 1, "accumulate": 64, "repeats": 5}
    if gain is not None:
        figures |= {"gain": gain, "verdict": gain.verdict(), "compared_losses": 20}
        figures |= {"tolerance": "exact", "within_tolerance": True, "loss_difference": 0.0}
        figures |= {"tolerance_reason": "20 losses, tolerance: bit-equal"}
    return Row(name=name, kind=kind, **(figures | more))


LATE = "not measured: the time was up before its turn."


def unmeasured(name, kind, status, reason, **more):
    return Row(name=name, kind=kind, status=status, reason=reason, **more)


def sample_rows():
    gain, none, slower = (Figure(median=m, low=m - 0.03, high=m + 0.03) for m in (2.1, 1.01, 0.87))
    unsure = Figure(median=1.02, low=None, high=None)
    unchecked = {"within_tolerance": None, "tolerance_reason": "not checked: two repeats"}
    late = "timed-out in one repeat: It did not end within 60 s."
    absent = "cannot run here, because: it is a CPU."
    broken = {"within_tolerance": False, "loss_difference": 0.2, "repeats": 1}
    return [
        row("baseline", "baseline", 13_415.0),
        row("+ pretokenised", "added", 28_171.0, gain, speedup="pretokenised"),
        row("+ prefetch", "added", 28_400.0, none, tolerance="rounding", loss_difference=3.2e-7),
        row("+ wrong", "added", 29_000.0, unsure, **broken),
        unmeasured("+ huge", "added", "out-of-memory", "Out of memory at step 0: it needs 91 GiB."),
        row(
            "all but prefetch",
            "leave-one-out",
            28_300.0,
            none,
            tolerance="statistical",
            **unchecked,
        ),
        unmeasured("all but wrong", "leave-one-out", "not-measured", LATE),
        row("all, with bf16 for fp16", "add-one", 24_000.0, slower, replaced=["fp16"], reason=late),
        unmeasured("all and liger", "add-one", "not-measured", LATE),
        unmeasured("all and compile", "add-one", "timed-out", "It did not end within 90 s."),
        unmeasured("tf32", "absent", "not-measured", absent, speedup="tf32"),
    ]


@pytest.fixture(scope="session")
def sample_report():
    """An ablation with every kind of row."""
    result = TrialResult(status="ok", tokens_per_s=13_415.0, losses=[3.1, 2.9])
    return Bench(
        path="bench/mine",
        kind="ablation",
        recipe="shakespeare-char",
        config={"name": "shakespeare-char"},
        config_digest="0" * 64,
        machine="A <fast> CPU & more, 2 cores, 24 GiB",
        environment={"torch": "2.13.0", "threads": 2},
        commit="abc1234",
        began="2026-11-20T08:00:00+00:00",
        wall_s=345.6,
        minutes=6.0,
        repeats=5,
        complete=True,
        notes=["Not every line has 5 repeats."],
        rows=sample_rows(),
        total_speedup=2.16,
        total_speedup_low=2.1,
        total_speedup_high=2.2,
        trials=[Trial(point="baseline", round=0, seed=0, result=result)],
    )
