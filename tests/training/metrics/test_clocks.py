"""Times of data, host and device add up to the step on a CPU, and nothing waits on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from flatout.training.loop import Session, fit
from flatout.training.metrics.clocks import Interval, StepClock
from flatout.training.metrics.log import Log
from flatout.training.step import StepResult


class Event:
    """A CUDA event that reads the time of the `stream` fixture."""

    def __init__(self, enable_timing=False):
        self.at_s = None

    def record(self, stream):
        self.at_s = stream.now_s

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def stream(monkeypatch):
    stream = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def take_step(log, run, clock, *, work_s, wait_s=0.0, rest_s=0.0):
    clock.now += wait_s
    with log.clock:
        clock.now += work_s
    clock.now += rest_s
    run.step += 1
    batch = SimpleNamespace(wait_ms=1e3 * wait_s, tokens=128, samples=8, seq_len=16)
    log.step(batch, StepResult(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(128.0), 0.1))


def test_parts_add_up_to_the_step_on_a_cpu():
    spans = [lambda: 0.3] * 4
    interval = Interval(10.0, 15.0, 4, wait_s=0.5, aside_s=3.0, blocked_s=1.2, spans=spans)
    figures = interval.figures()
    assert figures == pytest.approx(
        {"perf/step_ms": 500, "perf/data_wait_ms": 125, "perf/host_ms": 75, "perf/device_ms": 300}
    )
    assert figures["perf/step_ms"] == pytest.approx(sum(figures.values()) - figures["perf/step_ms"])


def test_every_record_breaks_down_its_step_time(start_run, collector, clock):
    run = start_run(log__every=2, speedups="none")
    with Log(run, [collector]) as log:
        for _ in range(2):
            take_step(log, run, clock, work_s=0.3, wait_s=0.1, rest_s=0.05)
        for _ in range(2):
            take_step(log, run, clock, work_s=0.7)
    assert [record["perf/device_ms"] for record in collector.records] == pytest.approx([300, 700])
    assert [record["perf/host_ms"] for record in collector.records] == pytest.approx([50, 0])
    assert [record["perf/data_wait_ms"] for record in collector.records] == pytest.approx([100, 0])
    assert [record["perf/step_ms"] for record in collector.records] == pytest.approx([450, 700])


def test_the_records_of_a_run_add_up(start_run, collector):
    run = start_run(log__every=3)
    with Log(run, [collector]) as log:
        fit(Session(run, log))
        log.close()
    assert [record["step"] for record in collector.records] == [3, 6]
    for record in collector.records:
        parts = record["perf/data_wait_ms"] + record["perf/host_ms"] + record["perf/device_ms"]
        assert parts == pytest.approx(record["perf/step_ms"])
        assert record["perf/device_ms"] > 0


def test_a_gpu_clock_reads_the_stream_and_counts_only_readbacks_as_blocked(stream, clock):
    cuda = StepClock(torch.device("cuda", 0))
    for _ in range(3):
        with cuda:
            stream.now_s += 0.25
            clock.now += 0.01
        with cuda.reading():
            clock.now += 0.2
    blocked_s, spans = cuda.take()
    assert blocked_s == pytest.approx(0.6)
    assert sum(span() for span in spans) == pytest.approx(0.75)
    assert cuda.take() == (0.0, [])


@pytest.mark.gpu
@pytest.mark.gpu_essential
def test_a_real_gpu_is_timed_without_waiting_for_it():
    device = torch.device("cuda", 0)
    cuda = StepClock(device)
    matrix = torch.randn(4096, 4096, device=device)
    with cuda:
        for _ in range(50):
            matrix = matrix @ matrix * 1e-3
    with cuda.reading():
        torch.cuda.synchronize()
    blocked_s, spans = cuda.take()
    assert blocked_s > 0
    assert sum(span() for span in spans) > 0
