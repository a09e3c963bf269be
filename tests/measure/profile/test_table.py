"""Kernels by class against the roof, and the times at which the device idles."""

from __future__ import annotations

import pytest
from chrome_trace import US, document

from flatout.measure.profile.events import read_events
from flatout.measure.profile.report import ProfileRoof
from flatout.measure.profile.table import class_of, gaps_of, table_of, work_of

ROOF = ProfileRoof(peak_tflops=1.0, gb_per_s=100.0)


@pytest.fixture
def recording():
    return read_events(document(), wall_s=1.0)


@pytest.fixture
def table(recording):
    trace = recording.trace
    return table_of(work_of(trace.ops, trace.kernels), steps=2, roof=ROOF)


def test_rows_add_up_and_the_longest_is_first(table):
    assert [row.kind for row in table] == ["matmul", "elementwise", "optimizer", "copy"]
    assert sum(row.share for row in table) == pytest.approx(1.0)
    assert sum(row.seconds for row in table) == pytest.approx(37 * US)
    assert table[0].calls == 2
    assert table[0].slowest == "nvjet_tst_128x256"


def test_rates_are_shares_of_the_roof(table):
    product = table[0]
    tflops = 2 * 8 * 64 * 32 / (24 * US) / 1e12
    assert product.tflops == pytest.approx(tflops)
    assert product.of_peak == pytest.approx(tflops)
    assert product.of_bandwidth == pytest.approx(product.gb_per_s / 100)


def test_what_is_unknown_stays_unknown(recording, table):
    elementwise = table[1]
    assert elementwise.tflops is None
    assert elementwise.of_peak is None
    trace = recording.trace
    rows = table_of(work_of(trace.ops, trace.kernels), steps=2, roof=ProfileRoof())
    assert rows[0].tflops is not None
    assert rows[0].of_peak is None
    assert table_of([], steps=2, roof=ROOF) == ()


def test_what_the_optimiser_starts_belongs_to_it(recording):
    update = [op for op in recording.trace.kernels if op.within == "optimizer"]
    assert {class_of(op) for op in update} == {"optimizer"}
    assert {op.kind for op in update} == {"elementwise"}


def test_without_kernels_the_operations_of_the_host_are_the_work(recording):
    names = [op.name for op in work_of(recording.trace.ops, ())]
    assert names[:2] == ["aten::linear", "aten::mm"]


def test_the_longest_gap_says_what_the_host_did(recording):
    step = recording.steps[0]
    gaps = gaps_of(recording.trace.kernels, recording.trace.ops, step, recording.phases)
    assert [round(gap.seconds / US) for gap in gaps[:3]] == [30, 21, 10]
    assert gaps[0].host_op == "aten::linear"
    assert gaps[0].phase == "forward"
    assert gaps[1].phase == "optimizer"
    assert gaps[2].host_op is None
