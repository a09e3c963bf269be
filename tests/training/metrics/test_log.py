"""The log: delayed readback, clocks that exclude evaluation, training rates."""

import json
from types import SimpleNamespace

import pytest
import torch

from flatout.hardware.roofline import Peak
from flatout.storage.json_io import LineReader
from flatout.training import finish
from flatout.training.metrics import alarms, device
from flatout.training.metrics import log as log_module
from flatout.training.metrics.log import Log, Rates
from flatout.training.metrics.observers import Quiet
from flatout.training.metrics.readback import DelayedReadback
from flatout.training.run import run_training
from flatout.training.step import StepResult

pytestmark = pytest.mark.slow


def test_numbers_are_read_back_one_step_late_and_in_order():
    readback = DelayedReadback()
    readback.push(1, {"loss": torch.tensor(3.0)}, due=True)
    assert readback.ready() == []
    readback.push(2, {"loss": torch.tensor(2.0)}, due=False)
    assert readback.ready() == [(1, {"loss": 3.0})]
    readback.push(3, {"loss": torch.tensor(1.0)}, due=True)
    assert readback.ready() == []
    assert readback.ready(flush=True) == [(3, {"loss": 1.0})]
    assert readback.ready(flush=True) == []


def test_a_number_keeps_its_value_when_its_tensor_changes_later():
    readback = DelayedReadback()
    loss = torch.tensor(3.0)
    readback.push(1, {"loss": loss}, due=True)
    loss.fill_(9.0)
    assert readback.ready(flush=True) == [(1, {"loss": 3.0})]


@pytest.mark.parametrize(("system", "factor"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_a_process_is_in_bytes_on_every_system(monkeypatch, system, factor):
    usage = SimpleNamespace(ru_maxrss=5000)
    monkeypatch.setattr(device.sys, "platform", system)
    monkeypatch.setattr(device.resource, "getrusage", lambda _who: usage)
    assert device.process_peak_bytes() == 5000 * factor


def step(log, run, *, tokens=128, samples=8, seq_len=16):
    run.step += 1
    batch = SimpleNamespace(wait_ms=5.0, tokens=tokens, samples=samples, seq_len=seq_len)
    log.step(batch, StepResult(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(128.0), 0.1))


def test_evaluation_does_not_lower_the_tokens_per_second(start_run, clock):
    run = start_run(train__steps=3)
    with Log(run) as log:
        clock.now += 9.0
        step(log, run)
        with log.aside("evaluation"):
            clock.now += 40.0
        clock.now += 2.0
        step(log, run)
        clock.now += 4.0
        step(log, run)
        log.close()
    assert log.rates[0].tokens_per_s == pytest.approx(128 / 9)
    assert [rates.tokens_per_s for rates in log.rates[1:]] == [
        pytest.approx(128 / 2),
        pytest.approx(128 / 4),
    ]
    assert log.wall_s == pytest.approx(55.0)


def test_mfu_is_unknown_when_it_would_exceed_one(start_run):
    run = start_run()
    with Log(run) as log:
        run.peak = Peak(tflops=1e-9, source="made up")
        assert log.mfu(500.0) == pytest.approx(0.5)
        assert log.mfu(1001.0) is None
        run.peak = None
        assert log.mfu(500.0) is None


def test_rates_count_real_tokens_and_rows_and_flops_follow_the_row_length(
    start_run, tmp_path, clock
):
    run = start_run(train__steps=2)
    flops = {seq_len: float(run.core.flops_per_token(seq_len).causal_exact) for seq_len in (4, 16)}
    assert flops[4] < flops[16]
    run.peak = Peak(tflops=flops[4] * 20 * 1e-12, source="made up")
    with Log(run) as log:
        for tokens, samples, seq_len in ((100, 8, 16), (60, 20, 4)):
            clock.now += 6.0
            step(log, run, tokens=tokens, samples=samples, seq_len=seq_len)
        log.close()
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert (last["perf/tokens_per_s"], last["perf/samples_per_s"]) == pytest.approx((10.0, 20 / 6))
    assert last["perf/mfu"] == pytest.approx(0.5)
    assert log.rates[1:] == [pytest.approx((10.0, 10 * flops[4]))]


def test_steady_rates_exclude_the_first_interval(start_run):
    run = start_run()
    with Log(run) as log:
        assert log.steady_rates() is None
        log.rates = [Rates(5.0, 1.0)]
        assert log.steady_rates() == (5.0, 1.0)
        log.rates += [Rates(100.0, 4.0), Rates(300.0, 6.0), Rates(200.0, 9.0)]
        assert log.steady_rates() == (200.0, 6.0)


@pytest.mark.parametrize("saving", ["+async-checkpoints", "-async-checkpoints"])
def test_a_run_killed_after_a_save_has_every_record_up_to_it(
    tiny_config, tmp_path, saving, records
):
    config = tiny_config(checkpoint__every_steps=3, speedups=f"auto,-compile,{saving}")

    class Killed(Exception):
        pass

    class KillAtSave(Quiet):
        def on_event(self, event):
            if event["event"] == "save":
                raise Killed

    with pytest.raises(Killed):
        run_training(config, tmp_path, observers=[KillAtSave()])
    run_training(config, tmp_path)
    trained = [record["step"] for record in records(tmp_path) if "train/loss" in record]
    assert trained == [*range(1, 7)]


def test_the_training_loss_survives_a_kill_during_the_final_evaluation(
    tiny_config, tmp_path, killed_in
):
    whole = run_training(tiny_config(), tmp_path / "whole")
    with killed_in(finish, "log_evaluation"):
        run_training(tiny_config(), tmp_path / "run")
    summary = run_training(tiny_config(), tmp_path / "run")
    assert summary["train_loss"] == whole["train_loss"]
    assert summary["steps"] == whole["steps"]


class Events(Quiet):
    """Keeps the events of a run."""

    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)


def test_an_alarm_is_an_event_and_is_counted(tiny_config, tmp_path, monkeypatch):
    """Any loss above the median of the first three counts here."""
    limits = {"WARM_UP": 0, "LEAST": 3, "RECENT": 2, "MOST": 2, "SAMPLE_S": 0.0, "DEVIATIONS": 0.0}
    for name, value in limits.items():
        monkeypatch.setattr(alarms, name, value)
    watch = Events()
    config = tiny_config(train__steps=8, log__every=1, optim__lr=10.0)
    summary = run_training(config, tmp_path / "run", observers=[watch])
    found = [event for event in watch.events if event["event"] == "alarm"]
    (first,) = [event for event in found if event["kind"] == "loss"]
    assert first in list(LineReader(tmp_path / "run" / "events.jsonl").read())
    assert 4 <= first["step"] <= 8
    assert summary["alarms"] == len(found)


@pytest.mark.parametrize(
    ("name", "owner", "metric"),
    [
        ("memory", log_module, "memory_gib"),
        ("the GPU's state", log_module, "gpu_figures"),
        ("alarms", log_module.Alarms, "see"),
        ("the load of other processes", log_module.OtherProcesses, "figures"),
    ],
)
def test_a_measurement_that_fails_ends_itself_and_not_the_run(
    tiny_config, tmp_path, monkeypatch, messages, name, owner, metric
):
    def fails(*_):
        raise OSError("/proc is not what it was")

    monkeypatch.setattr(owner, metric, fails)
    config = tiny_config(train__steps=4, log__every=1)
    summary = run_training(config, tmp_path / "run", progress=messages)
    assert summary["steps"] == 4
    told = [line for line in messages.lines if "without measuring" in line]
    assert told == [
        f"Training continues without measuring {name}: OSError: /proc is not what it was."
    ]
