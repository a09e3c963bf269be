"""A resumed run takes the peak rate that it measured, where nothing else has changed."""

import pytest

from flatout.hardware import probe
from flatout.roof import Peak
from flatout.training import peak
from flatout.training.run import run_training
from flatout.training.run_dir import layout

MEASURED = Peak(7.0, "measured here, matmul 8³, fp32")


@pytest.fixture
def measurements(monkeypatch):
    """The dtypes of the measurements, which take no time."""
    found = []

    def measure(machine, device, dtype):
        found.append(dtype)
        return MEASURED

    monkeypatch.setattr(peak, "known_peak", measure)
    return found


@pytest.fixture
def started(tiny_config, tmp_path):
    run_training(tiny_config(train__steps=1), tmp_path / "run")
    return tmp_path / "run"


def find(folder, dtype="fp32"):
    return peak.peak_of_run(folder, is_resumed=True)(probe(), "cpu", dtype)


def test_the_peak_of_a_start_is_that_of_the_resume(started, measurements):
    (start,) = (one for one in layout.read_events(started) if one["event"] == "start")
    assert start["peak_source"].endswith(", fp32")
    assert find(started) == Peak(start["peak_tflops"], start["peak_source"])
    assert not measurements


@pytest.mark.parametrize(
    "change", ["dtype", "threads", "torch", "machine", "data sheet", "nothing"]
)
def test_it_is_measured_when_anything_differs(started, measurements, change):
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
    assert find(started, "bf16" if change == "dtype" else "fp32") == MEASURED
    assert len(measurements) == 1


def test_a_new_run_measures(tmp_path, measurements):
    assert peak.peak_of_run(tmp_path, is_resumed=False) is peak.known_peak
