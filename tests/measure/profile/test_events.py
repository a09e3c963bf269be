"""Reading the profiler's file: links from kernels to operations, phases, costs, memory."""

from __future__ import annotations

import pytest
from chrome_trace import US, document, operation, ranged

from flatout.measure.profile.events import read_events


@pytest.fixture
def recording():
    return read_events(document(), wall_s=1.0)


def test_steps_and_phases_follow_each_other(recording):
    assert len(recording.steps) == 2
    assert [phase.name for phase in recording.phases[:5]] == [
        "data",
        "forward",
        "backward",
        "optimizer",
        "logging",
    ]
    forward, backward = recording.phases[1:3]
    assert forward.end_s == backward.start_s
    assert recording.phase_at(15 * US).name == "forward"
    assert recording.phase_at(150 * US) is None  # between the steps


def test_kernels_have_the_phase_and_the_operation_that_started_them(recording):
    product, rest, gelu, copy, update = recording.trace.kernels[:5]
    assert product.launched_by == "aten::mm"
    assert product.within == "forward"  # queued there, although it runs later
    assert product.kind == rest.kind == "matmul"
    assert gelu.launched_by == "aten::gelu"
    assert update.within == "optimizer"
    assert copy.kind == "copy"
    assert recording.trace.busy_s() == pytest.approx(37 * US)


def test_an_operation_with_several_kernels_is_counted_once(recording):
    product, rest, gelu, copy, _ = recording.trace.kernels[:5]
    assert product.flops == 2 * 8 * 64 * 32
    assert product.bytes == 2 * (8 * 64 + 64 * 32 + 8 * 32)
    assert (rest.flops, rest.bytes) == (0, 0)
    assert gelu.flops is None
    assert copy.bytes == 512


def test_operations_nest_and_wrappers_cost_nothing(recording):
    linear, product = recording.trace.ops[:2]
    assert linear.self_s == pytest.approx(4 * US)
    assert product.parent == "aten::linear"
    assert linear.flops == linear.bytes == 0


def test_memory_of_host_and_device_are_told_apart(recording):
    assert len(recording.device_allocations) == 4
    assert recording.host_allocations == ()
    assert recording.device_allocations[0].allocated == 10512


def test_a_file_without_marks_is_read():
    events = [operation("aten::mm", 5.0, 2.0, 1), ranged("user_annotation", "mine", 5.0, 1.0)]
    recording = read_events({"traceEvents": events}, wall_s=1.0)
    assert recording.steps == recording.phases == ()
    assert recording.trace.ops[0].within is None
    assert read_events({"traceEvents": []}, wall_s=1.0).trace.ops == ()
