"""A step is divided by what the profiler saw, and each moment counts once."""

from __future__ import annotations

import pytest

from flatout.measure.attach.gathering import compute_on_cpu, step_on_gpu
from flatout.measure.attach.trace import Op, Trace


def op(name, start_s, seconds, within=None):
    return Op(name, start_s, seconds, seconds, within=within)


def test_forward_and_backward_on_a_cpu_are_products_memory_and_python():
    ops = (
        op("aten::mm", 0.0, 0.4),
        op("aten::add", 0.4, 0.2),
        op("aten::mul", 0.6, 0.3, within="optimizer"),
    )
    found = compute_on_cpu(Trace(ops, (), 1), 1.0)
    assert found == pytest.approx({"compute_s": 0.4, "memory_bound_s": 0.2, "host_s": 0.4})


def test_operations_that_were_slower_when_recorded_are_scaled():
    ops = (op("aten::mm", 0.0, 3.0), op("aten::add", 3.0, 1.0))
    found = compute_on_cpu(Trace(ops, (), 2), 1.0)
    assert found == pytest.approx({"compute_s": 0.75, "memory_bound_s": 0.25, "host_s": 0.0})


def test_an_idle_gpu_waits_for_what_the_host_does():
    kernels = (
        op("ampere_sgemm_128x64", 0.0, 0.3),
        op("Memcpy HtoD (Pageable -> Device)", 0.3, 0.1),
    )
    found = step_on_gpu(Trace((), kernels, 1), 1.0, {"data_wait": 0.2, "compute": 0.8})
    assert found["compute_s"] == pytest.approx(0.3)
    assert found["copy_s"] == pytest.approx(0.1)
    assert found["data_wait_s"] == pytest.approx(0.2)
    assert found["host_s"] == pytest.approx(0.4)
    assert sum(found.values()) == pytest.approx(1.0)
