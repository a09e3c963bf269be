"""Reading torch.profiler: real steps on the CPU, and the made-up trace of a GPU."""

from __future__ import annotations

import pytest
import torch
from chrome_trace import US, document, kernel, operation, ranged

from flatout.measure.attach.trace import document_in, phase_ranges, profiling, read_trace
from flatout.training.metrics.phases import PhaseTimer


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two steps on the CPU."""
    weight, timer = torch.ones(64, 64, requires_grad=True), PhaseTimer()
    optimizer = torch.optim.AdamW([weight])
    with profiling("cpu") as profiler, phase_ranges(timer):
        for _ in range(2):
            with timer.phase("compute"):
                with timer.phase("forward"), timer.phase("gc"):
                    loss = torch.nn.functional.gelu(torch.ones(8, 64) @ weight).sum()
                loss.backward()
                with timer.phase("optimizer"):
                    optimizer.step()
            optimizer.zero_grad()
            loss.item()
    path = tmp_path_factory.mktemp("raw") / "raw.json"
    profiler.export_chrome_trace(str(path))
    return read_trace(document_in(path), steps=2)


def test_operations_have_classes_and_times(trace):
    rows = {row.kind: row for row in trace.table()}
    assert rows["matmul"].calls == 2  # forward, and the gradient of the weight
    assert rows["matmul"].seconds > 0
    assert "communication" not in rows
    assert trace.busy_s() is None
    assert trace.kernels == ()
    counts = trace.counted(work_s=1.0)  # not those that others call
    assert 5 < counts["ops"] < len([op for op in trace.ops if op.name.startswith("aten::")]) / 2
    assert 0 < counts["tiny_op_s"] <= 1.0
    assert counts["tiny_ops"] <= counts["ops"]


def test_operations_have_the_innermost_phase(trace):
    names = {
        phase: {op.name for op in trace.ops if op.within == phase}
        for phase in ("compute", "forward", "optimizer")
    }
    assert names["forward"] >= {"aten::mm", "aten::gelu"}
    assert "aten::gelu_backward" in names["compute"]
    assert "aten::mm" not in names["optimizer"]
    assert {op.kind for op in trace.ops if op.within == "optimizer"} <= {"optimizer", "copy"}


@pytest.fixture
def gpu():
    """Two steps on a made-up GPU."""
    return read_trace(document(), steps=2)


def test_kernels_have_the_phase_and_the_operation_that_started_them(gpu):
    product, rest, gelu, copy, update = gpu.kernels[:5]
    assert product.launched_by == "aten::mm"
    assert product.within == "forward"  # queued there, although it runs later
    assert product.kind == rest.kind == "matmul"
    assert gelu.launched_by == "aten::gelu"
    assert update.within == update.kind == "optimizer"
    assert copy.kind == "copy"
    assert gpu.busy_s() == pytest.approx(37 * US)


def test_operations_nest(gpu):
    linear, product = gpu.ops[:2]
    assert linear.self_s == pytest.approx(4 * US)
    assert (product.parent, product.within) == ("aten::linear", "forward")


def test_a_file_without_marks_is_read():
    events = [operation("aten::mm", 5.0, 2.0, 1), ranged("user_annotation", "mine", 5.0, 1.0)]
    found = read_trace({"traceEvents": events}, steps=1)
    assert found.ops[0].within is None
    assert read_trace({"traceEvents": []}, steps=1).ops == ()


def test_rows_add_up_and_the_longest_is_first(gpu):
    table = gpu.table()
    assert [row.kind for row in table] == ["matmul", "elementwise", "optimizer", "copy"]
    assert sum(row.share for row in table) == pytest.approx(1.0)
    assert sum(row.seconds for row in table) == pytest.approx(37 * US)
    assert table[0].calls == 2


def test_calls_on_a_cpu_are_those_that_no_other_of_the_class_makes():
    events = [
        operation("aten::linear", 0, 10, 1),
        operation("aten::mm", 2, 6, 2),
        operation("autograd::engine::evaluate_function: MmBackward0", 19, 7, 5),
        operation("aten::mm", 20, 5, 3),
        operation("aten::gelu", 30, 5, 4),
    ]
    rows = {row.kind: row for row in read_trace({"traceEvents": events}, steps=1).table()}
    assert (rows["matmul"].calls, rows["elementwise"].calls) == (2, 1)
    assert rows["matmul"].seconds == pytest.approx(15 * US)


def test_kernels_that_overlap_are_busy_once_and_short_ones_are_tiny():
    events = [
        kernel("sm90_xmma_gemm_bf16", 0, 100, 0, 0),
        kernel("ncclDevKernel_AllReduce", 50, 100, 0, 0),
        kernel("Memcpy HtoD (Pinned -> Device)", 300, 10, 0, 0, "gpu_memcpy", bytes=1),
    ]
    found = read_trace({"traceEvents": events}, steps=2)
    assert found.busy_s() == pytest.approx(160 * US / 2)
    assert {row.kind for row in found.table()} == {"matmul", "communication", "copy"}
    assert found.counted(1.0) == pytest.approx({"ops": 1.5, "tiny_ops": 0.5, "tiny_op_s": 7.5 * US})
