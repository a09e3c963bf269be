"""The stages of a measurement: which steps its figures are about."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import torch

from flatout.measure.attach import stages
from flatout.measure.attach.request import Recording
from flatout.training.metrics.phases import PhaseTimer


def test_the_step_of_a_memory_snapshot_is_no_profiled_one(monkeypatch):
    """On a GPU it follows the recorded ones, and is slower than they are."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=lambda: now.s))
    monkeypatch.setattr(stages, "profiling", lambda device: nullcontext(Mock()))
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(torch.cuda.memory, name, Mock())
    found = stages.Stages(
        PhaseTimer(),
        "cuda",
        on_step=Mock(),
        recorded_steps=0,
        is_enough=Mock(),
        recording=Recording(steps=2, skip=1, trace="trace", snapshot="snapshot"),
    )
    for seconds in (1.0, 2.0, 30.0):
        assert found.recorded() is None
        assert found.start_step()
        now.s += seconds
    assert not found.start_step()
    recorded = found.recorded()
    assert (recorded.first_step, recorded.seconds) == (2, 3.0)
    torch.cuda.memory._dump_snapshot.assert_called_once_with("snapshot")
