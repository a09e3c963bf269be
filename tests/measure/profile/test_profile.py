"""Profiles of real steps on the CPU: the steps, the phases, the files; and when they go wrong."""

import errno
import gzip
import json
import sys
from unittest.mock import Mock

import pytest

from flatout.errors import RunFailed
from flatout.measure.profile import profile as profiles
from flatout.measure.profile.profile import profile_script, run_profile
from flatout.measure.profile.result import Profile

pytestmark = pytest.mark.slow


NOT_PERMITTED = """
import torch.autograd.profiler as profiler

def refused(*_, **__):
    raise RuntimeError("profiling is not permitted\\nand more")

profiler.profile.__init__ = refused
"""
LOOP = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(1000):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def quick(tiny_config, tmp_path):
    """Return a function that profiles the tiny recipe."""

    def measure(steps=2, skip=2, **changes):
        out = tmp_path / "out"
        config = tiny_config(**{"train__steps": 60} | changes)
        return run_profile(config, steps=steps, skip=skip, out=out), out

    return measure


def test_steps_phases_and_classes_of_a_run(quick):
    found, out = quick(skip=None, optim__kind="adamw")
    assert found.steps == 2
    assert found.first_step > 2
    rows = {row.kind: row for row in found.table}
    assert rows.keys() >= {"matmul", "elementwise", "optimizer", "copy"}
    assert sum(row.share for row in found.table) == pytest.approx(1.0)
    assert rows["matmul"].calls > 0
    assert 0 <= found.outside_ms < found.profiled_step_ms
    assert found.notes == ()
    files = {path.name for path in out.iterdir()}
    assert files == {"profile.json", "trace.json.gz"}
    assert Profile.model_validate_json((out / "profile.json").read_text()) == found


def test_a_script_is_profiled_too(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    found = profile_script([sys.executable, str(tmp_path / "loop.py")], out=tmp_path / "out")
    assert {row.kind for row in found.table} >= {"matmul", "optimizer"}
    assert found.step_ms > 0
    assert (tmp_path / "out" / "trace.json.gz").exists()


def test_a_script_that_ends_while_it_is_recorded_is_an_error(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP.replace("1000", "5"))
    command = [sys.executable, str(tmp_path / "loop.py")]
    with pytest.raises(RunFailed, match="it took too few steps"):
        profile_script(command, steps=3, skip=3, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = profile_script(command, steps=2, skip=3, out=tmp_path / "out")
    assert (found.first_step, found.steps) == (4, 2)


def test_a_script_with_a_profiler_of_its_own_is_timed(tmp_path):
    with_profiler = "own = torch.profiler.profile().__enter__()\nfor _ in"
    (tmp_path / "loop.py").write_text(LOOP)
    command = [sys.executable, str(tmp_path / "loop.py")]
    profile_script(command, out=tmp_path / "out")
    (tmp_path / "loop.py").write_text(LOOP.replace("for _ in", with_profiler))
    found = profile_script(command, out=tmp_path / "out")
    assert found.table is found.trace is None
    assert not (tmp_path / "out" / "trace.json.gz").exists(), "that of the first one"
    assert "Another profiler is active" in found.notes[0]
    assert found.profiled_step_ms > 0


@pytest.mark.thorough
def test_the_trace_has_what_perfetto_requires(quick):
    """Strict JSON, ranges that nest on each thread, all at about one time."""
    found, out = quick()
    text = gzip.decompress((out / "trace.json.gz").read_bytes())
    events = json.loads(text, parse_constant=pytest.fail)["traceEvents"]
    names = [event["name"] for event in events]
    assert f"flatout.step {found.first_step}" in names
    assert names.count("flatout.forward") == 2 * 2  # two micro-batches in each of two steps

    timed = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    assert all(isinstance(time_us, (int, float)) for time_us in times)
    assert max(times) - min(times) < 60e6
    assert all(event["name"] and "pid" in event for event in timed)
    threads = {}
    ranges = [event for event in timed if event["ph"] == "X"]
    for event in sorted(ranges, key=lambda one: (one["ts"], -one["dur"])):
        assert event["dur"] >= 0
        ends = threads.setdefault((event["pid"], event["tid"]), [])
        end_us = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 1e-3:
            ends.pop()
        assert not ends or end_us <= ends[-1] + 1e-3, f"{event['name']} ends too late"
        ends.append(end_us)
    assert len(threads) > 1


@pytest.mark.thorough
def test_chosen_steps_are_profiled(quick):
    found, _ = quick(steps=1, skip=4, train__steps=6)  # up to the last but one
    assert found.first_step == 5
    assert found.step_ms is not None
    found, _ = quick(steps=1, skip=1)
    assert (found.first_step, found.step_ms) == (2, None)


@pytest.mark.thorough
def test_weights_in_host_memory_are_profiled(quick):
    found, _ = quick(steps=1, skip=1, parallel__offload="cpu")
    assert {row.kind for row in found.table} >= {"matmul", "optimizer"}


def test_a_run_that_is_too_short_is_an_error(quick, tmp_path):
    with pytest.raises(RunFailed, match="it took too few steps"):
        quick(steps=2, skip=5, train__steps=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_without_a_profiler_step_times_and_phases_remain(quick, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(NOT_PERMITTED)
    found, out = quick()
    assert found.table is found.trace is None
    assert found.profiled_step_ms > 0
    assert "profiling is not permitted." in found.notes[0]
    assert not (out / "trace.json.gz").exists()


@pytest.mark.thorough
def test_a_full_disk_is_named_and_nothing_is_left_behind(quick, monkeypatch, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", "trace.json.gz")
    monkeypatch.setattr(profiles, "CheckedFile", Mock(side_effect=full))
    with pytest.raises(RunFailed, match=r"Cannot write trace\.json\.gz: No space left") as bad:
        quick()
    assert "Free space" in bad.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_run_that_fails_is_an_error_of_its_own(quick, tmp_path):
    with pytest.raises(RunFailed, match="has diverged"):
        quick(skip=30, train__steps=40, optim__lr=1e30, optim__clip=0, schedule__warmup=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_a_gpu_has_kernels_and_a_snapshot(quick):
    found, out = quick(train__device="cuda")
    assert 0 < found.outside_ms < found.profiled_step_ms
    kinds = {row.kind: row for row in found.table}
    assert kinds["matmul"].calls > 0
    assert kinds["optimizer"].calls > 0
    assert (out / "memory-snapshot.pickle").stat().st_size > 0
    assert found.notes == ()
