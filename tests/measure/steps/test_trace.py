"""Reading torch.profiler: real steps on the CPU, and made-up events of a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import DeviceType

from flatout.measure.steps.trace import Trace, profiling, read


def steps(number):
    weight = torch.ones(64, 64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    for _ in range(number):
        with torch.profiler.record_function("forward"):
            loss = torch.nn.functional.gelu(torch.ones(8, 64) @ weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


@pytest.fixture(scope="module")
def trace():
    start_s = time.perf_counter()
    with profiling("cpu") as profiler:
        steps(2)
    return read(profiler, steps=2, wall_s=time.perf_counter() - start_s)


def test_operations_have_classes_and_times(trace):
    shares = {share.kind: share for share in trace.shares()}
    assert shares["matmul"].calls == 3  # forward, and the gradient of the weight takes two views
    assert shares["matmul"].seconds > 0
    assert shares["matmul"].tflops > 0
    assert "communication" not in shares
    assert 0 < sum(share.seconds for share in shares.values()) <= trace.wall_s
    assert trace.busy_s() is None
    assert trace.kernels == ()


def test_reads_and_ranges_are_found(trace):
    assert len(trace.reads()) >= 2
    assert {op.name for op in trace.ops if op.within == "forward"} >= {"aten::mm", "aten::gelu"}
    assert "aten::_local_scalar_dense" not in {op.name for op in trace.outermost()}
    number, seconds = trace.tiny()
    assert number > 5
    assert seconds > 0


def event(name, start_us, end_us, device=DeviceType.CUDA, **more):
    span = SimpleNamespace(start=start_us, end=end_us)
    known = {
        "name": name,
        "time_range": span,
        "device_type": device,
        "is_user_annotation": False,
        "device_resource_id": 7,
        "flops": None,
        "cpu_parent": None,
        "thread": 1,
        "cpu_time_total": end_us - start_us,
        "self_cpu_time_total": end_us - start_us,
    }
    return SimpleNamespace(**known | more)


def test_kernels_of_a_gpu_are_the_work_and_overlaps_count_once():
    events = [
        event("cudaLaunchKernel", 0, 5, DeviceType.CPU),
        event("sm90_xmma_gemm_bf16", 0, 100),
        event("ncclDevKernel_AllReduce", 50, 150),
        event("Memcpy HtoD (Pageable -> Device)", 300, 310),
        event("Memcpy HtoD (Pinned -> Device)", 310, 320),
        event("ProfilerStep", 0, 400, is_user_annotation=True),
    ]
    profiler = SimpleNamespace(events=lambda: events)
    found: Trace = read(profiler, steps=2, wall_s=400e-6)
    assert found.busy_s() == pytest.approx(170e-6 / 2)
    assert {share.kind for share in found.shares()} == {"matmul", "communication", "copy"}
    assert [op.name for op in found.pageable_copies()] == ["Memcpy HtoD (Pageable -> Device)"]
    assert found.tiny()[0] == 1
