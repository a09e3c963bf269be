"""What else the machine does."""

import pytest

from flatout.hardware.machine import CpuTimes
from flatout.training.metrics import surroundings as module
from flatout.training.metrics.surroundings import Surroundings, limit_counts

pytestmark = pytest.mark.slow


def loads(*counters):
    found = iter([CpuTimes(*one) for one in counters])
    return Surroundings(cores=2, read_load=lambda: next(found), read_limits=lambda: (0, 0, 0))


def test_load_is_a_cause_only_when_it_grew_and_the_machine_is_full():
    grew = loads((0, 0, 0), (100, 100, 100), (110, 120, 110))
    grew.suspect(True)
    assert grew.other_load() == "other processes use 1.0 of 2 cores, up from 0.0"
    idle_cores = loads((0, 0, 0), (100, 50, 50), (110, 60, 55))
    idle_cores.suspect(True)
    assert idle_cores.other_load() is None
    as_before = loads((0, 0, 0), (100, 200, 100), (110, 220, 110))
    as_before.suspect(True)
    assert as_before.other_load() is None


def test_without_a_suspicion_there_is_nothing_to_compare():
    calm = loads((0, 0, 0), (100, 100, 100))
    calm.suspect(True)
    calm.suspect(False)
    assert calm.other_load() is None


@pytest.mark.parametrize(
    ("text", "heat", "found"),
    [
        ("usage_usec 5\nnr_periods 40\nnr_throttled 30\n", "7\n", (40, 30, 7)),
        ("usage_usec 5\n", "", (0, 0, 0)),
        (None, None, (0, 0, 0)),
    ],
)
def test_limits_are_read_from_the_system_where_it_has_them(
    monkeypatch, tmp_path, text, heat, found
):
    stats, hot = tmp_path / "cpu.stat", tmp_path / "heat"
    if text is not None:
        stats.write_text(text)
        hot.write_text(heat)
    monkeypatch.setattr(module, "CPU_STATS", (tmp_path / "missing", stats))
    monkeypatch.setattr(module, "HEAT_COUNTS", hot)
    assert limit_counts() == found
