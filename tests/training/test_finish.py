"""The end of a run."""

from types import SimpleNamespace

import pytest

from flatout.hardware.roofline import Peak
from flatout.training import finish

FIRST = Peak(1.0, "measured here, matmul 512³, fp32")


def run_with(peak):
    mesh = SimpleNamespace(device="cpu")
    return SimpleNamespace(peak=peak, machine=None, mesh=mesh, arithmetic="fp32")


@pytest.fixture
def measured(monkeypatch):
    """Return the list of peaks that further measurements find."""
    found = []
    monkeypatch.setattr(finish, "peak_tflops", lambda *_: found.pop())
    return found


def test_the_peak_of_a_short_run_is_measured_once(measured):
    log = SimpleNamespace(wall_s=finish.MEASURE_AGAIN_S / 2)
    assert finish.best_peak(run_with(FIRST), log) is FIRST


@pytest.mark.parametrize(
    ("again", "source"),
    [(0.9, FIRST.source), (1.05, "again"), (1.5, "again, at the end")],
)
def test_the_higher_of_two_measured_peaks_counts(again, source, measured):
    measured.append(Peak(again, "again"))
    events = []
    log = SimpleNamespace(
        wall_s=2 * finish.MEASURE_AGAIN_S, event=lambda kind, **fields: events.append(kind)
    )
    peak = finish.best_peak(run_with(FIRST), log)
    assert peak == Peak(max(again, FIRST.tflops), source)
    assert events == ["peak"] * (again > FIRST.tflops)


def test_the_peak_of_a_data_sheet_is_not_measured(measured):
    peak = Peak(989.0, "data sheet: NVIDIA")
    assert finish.best_peak(run_with(peak), SimpleNamespace(wall_s=100.0)) is peak
