"""Alarms: each trouble alone, its cause, one per episode, and silence on a healthy run."""

import random

import pytest

from flatout.hardware.machine import CpuTimes
from flatout.training.metrics.alarms import Alarms
from flatout.training.metrics.surroundings import GpuState, Surroundings

EVERY = 10
"""Steps per record."""


class Machine:
    """A made-up machine, on which only the test changes anything."""

    def __init__(self):
        self.gpu = None
        self.limits = (0, 0, 0)
        self.busy_s = self.now_s = 0.0

    def load(self):
        return CpuTimes(self.now_s, self.busy_s, 0.0)

    def surroundings(self):
        return Surroundings(
            cores=2,
            read_gpu=lambda: self.gpu,
            read_load=self.load,
            read_limits=lambda: self.limits,
        )


@pytest.fixture
def machine():
    return Machine()


def watched(machine, change=lambda i, record: None, *, count=300):
    """The events of a run with a step of 100 ms and 2% noise; `change` edits its records."""
    rng, alarms = random.Random(7), Alarms(machine.surroundings(), last_step=5000)
    found, wall_s = [], 0.0
    for i in range(1, count + 1):
        record = {"step": i * EVERY, "train/lr": 1e-3, "train/grad_norm": 1 + 0.1 * rng.random()}
        record |= {"train/loss": 3 + 0.02 * rng.gauss(0, 1), "mem/process_gib": 1.0}
        noise = 1 + 0.02 * rng.gauss(0, 1)
        times = {"data_wait": 0.5 * noise, "host": 1.0 * noise, "device": 98.5 * noise}
        record |= {f"perf/{name}_ms": value for name, value in times.items()}
        change(i, record)
        step_ms = sum(record[f"perf/{name}_ms"] for name in times)
        wall_s += EVERY * step_ms / 1e3
        machine.now_s = wall_s
        record |= {"wall_s": wall_s, "perf/step_ms": step_ms, "perf/tokens_per_s": 1e6 / step_ms}
        found += alarms.see(record)
    assert alarms.num_alarms == sum(event["event"] == "alarm" for event in found)
    return found


def kinds(events):
    return [(event["event"], event["kind"]) for event in events]


def test_a_healthy_run_has_no_alarm(machine):
    assert watched(machine, count=1000) == []


def test_a_run_of_a_few_milliseconds_per_record_has_none_for_seconds_of_trouble(machine):
    def change(i, record):
        for name in ("data_wait", "host", "device"):
            record[f"perf/{name}_ms"] /= 100
        if 2000 <= i < 2300:
            record["perf/device_ms"] *= 2

    assert watched(machine, change, count=4000) == []


def slow(name, extra_ms):
    def change(i, record):
        if 100 <= i < 200:
            record[f"perf/{name}_ms"] += extra_ms

    return change


@pytest.mark.parametrize(
    ("name", "kind", "cause"),
    [
        ("data_wait", "data_wait", "the next batch takes 30.5 ms, up from 0.5 ms"),
        ("host", "throughput", "work on the host rose from 1.0 to 31.0 ms per step"),
        ("device", "throughput", "work on the device rose from 98.5 to 128.5 ms per step"),
    ],
)
def test_the_part_of_the_step_that_grew_is_the_cause(machine, name, kind, cause):
    begun, ended = watched(machine, slow(name, 30))
    assert kinds([begun, ended]) == [("alarm", kind), ("alarm_over", kind)]
    assert 1050 <= begun["step"] <= 1080
    assert begun["since_step"] == 1000
    assert (
        begun["cause"].split("takes")[0].split("rose")[0]
        == cause.split("takes")[0].split("rose")[0]
    )
    assert begun["cause"] in begun["text"]
    assert ended["since_step"] == 1000
    assert 2050 <= ended["step"] <= 2110


def test_a_fall_states_both_rates(machine):
    begun, _ = watched(machine, slow("device", 25))
    assert begun["text"].startswith("Throughput fell 20% at step 1,000, from ")
    assert begun["usual"] == pytest.approx(10_000, rel=0.02)
    assert begun["now"] == pytest.approx(8_000, rel=0.02)


def test_other_processes_are_named_when_the_machine_is_full(machine):
    def change(i, record):
        machine.busy_s += 1.0 if i < 100 else 2.6
        slow("device", 30)(i, record)

    begun, _ = watched(machine, change)
    assert begun["cause"].startswith("other processes use 2.")
    assert "of 2 cores, up from 1.0" in begun["cause"]


def test_a_slower_clock_of_the_gpu_is_named(machine):
    def change(i, record):
        capped = i >= 100
        machine.gpu = GpuState((), capped, 1, 1200.0 if capped else 1900.0)
        slow("device", 30)(i, record)

    begun, _ = watched(machine, change)
    assert begun["cause"] == "the GPU's clock fell from 1,900 to 1,200 MHz, at its power cap"


def test_another_process_on_the_gpu_is_named(machine):
    def change(i, record):
        machine.gpu = GpuState((), False, 1 + (i >= 100), 1900.0)
        slow("device", 30)(i, record)

    begun, _ = watched(machine, change)
    assert begun["cause"] == "1 more process uses the GPU"


def test_heat_is_an_alarm_of_its_own_and_the_power_cap_is_not(machine):
    def change(i, _record):
        hot = ("heat",) if 100 <= i < 200 else ()
        machine.gpu = GpuState(hot, True, 1, 1900.0)

    begun, ended = watched(machine, change)
    assert kinds([begun, ended]) == [("alarm", "throttling"), ("alarm_over", "throttling")]
    assert (begun["usual"], begun["now"]) == (None, None)
    assert 990 <= begun["since_step"] <= 1060
    assert begun["text"].endswith("the GPU is slowed down by heat.")


def test_a_container_that_stops_the_process_is_throttling(machine):
    def change(i, _record):
        periods, stopped, hot = machine.limits
        machine.limits = (periods + 10, stopped + (8 if i >= 100 else 1), hot)

    (begun,) = watched(machine, change)
    assert begun["cause"].startswith("the container's CPU limit stopped the process in 80%")


def test_a_single_look_at_heat_is_no_alarm(machine):
    def change(i, _record):
        machine.limits = (0, 0, int(i >= 100))

    assert watched(machine, change) == []


def test_memory_that_grows_says_where_it_will_end(machine):
    def change(i, record):
        record["mem/process_gib"] += 0.002 * max(i - 100, 0)

    (begun,) = watched(machine, change, count=180)
    assert begun["kind"] == "host_memory"
    assert "grows by 0.17 GiB per 1,000 steps since step 930" in begun["text"]
    assert "at the last step it will be 1." in begun["text"]


def test_memory_that_will_not_suffice_says_when_it_ends(machine):
    alarms = Alarms(machine.surroundings(), last_step=5000, have_gib={"mem/process_gib": 1.5})
    found = []
    for i in range(1, 181):
        grown = 0.002 * max(i - 100, 0)
        found += alarms.see({"step": i * EVERY, "mem/process_gib": 1.0 + grown, "wall_s": i})
    assert "all 1.5 GiB will be in use at step 3,902" in found[0]["text"]


def test_a_spike_of_the_loss_names_the_gradients(machine):
    def change(i, record):
        if 100 <= i < 110:
            record["train/loss"] += 2
            record["train/grad_norm"] = 40.0

    begun, ended = watched(machine, change)
    assert kinds([begun, ended]) == [("alarm", "loss_spike"), ("alarm_over", "loss_spike")]
    assert begun["step"] == 1000
    assert begun["cause"].startswith("the gradient norm rose from 1.")
    assert begun["cause"].endswith("to 40")


def test_a_spike_without_gradients_is_the_text(machine):
    def change(i, record):
        if 100 <= i < 110:
            record["train/loss"] += 2

    begun, _ = watched(machine, change)
    assert "probably the text" in begun["cause"]


def test_evaluations_and_records_without_numbers_are_ignored(machine):
    alarms = Alarms(machine.surroundings(), last_step=10)
    assert alarms.see({"step": 1, "val/loss": 3.0, "wall_s": 100.0}) == []
    assert alarms.see({"step": 2}) == []
