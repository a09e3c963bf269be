"""A resumed run takes the peak rate that it measured, where nothing else has changed."""

import pytest

from flatout.assembly import run as assembling
from flatout.errors import Stopped
from flatout.hardware.machine import probe
from flatout.hardware.roofline import Peak
from flatout.training.peak import measured_peak
from flatout.training.run import run_training
from flatout.training.run_dir import layout


@pytest.fixture
def started(tiny_config, tmp_path):
    run_training(tiny_config(train__steps=1), tmp_path / "run")
    return tmp_path / "run"


def find(folder, dtype="fp32"):
    return measured_peak(folder, probe(), "cpu", dtype)


def test_the_peak_of_a_start_is_that_of_the_resume(started):
    (start,) = (one for one in layout.read_events(started) if one["event"] == "start")
    assert start["peak_source"].endswith(", fp32")
    assert find(started) == Peak(start["peak_tflops"], start["peak_source"])


@pytest.mark.parametrize(
    "change", ["dtype", "threads", "torch", "machine", "data sheet", "nothing"]
)
def test_it_is_measured_when_anything_differs(started, change):
    (start,) = (one for one in layout.read_events(started) if one["event"] == "start")
    changed = {
        "threads": {"environment": start["environment"] | {"threads": 99}},
        "torch": {"environment": start["environment"] | {"torch": "1.0"}},
        "machine": {"machine": "another"},
        "data sheet": {"peak_source": "data sheet: x, fp32"},
        "nothing": {"peak_tflops": None},
    }.get(change, {})
    fields = {
        key: value for key, value in (start | changed).items() if key not in ("event", "time")
    }
    layout.append_event(started, "resume", **fields)
    assert find(started, "bf16" if change == "dtype" else "fp32") is None


def test_a_resumed_run_does_not_measure(tiny_config, tmp_path, stop_at, monkeypatch):
    config = tiny_config(train__steps=4)
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(2)])
    monkeypatch.setattr(assembling, "known_peak", None)  # any call would fail
    assert run_training(config, tmp_path / "run")["steps"] == 4
