"""Profiles of real steps on the CPU: the steps, the phases, the files; and when they go wrong."""

from __future__ import annotations

import errno
import gzip
import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flatout.distributed.rendezvous import disconnect
from flatout.errors import ConfigError, RunFailed
from flatout.measure.profile import profile as profiles
from flatout.measure.profile.profile import long_enough, run_profile
from flatout.measure.profile.result import Profile

pytestmark = pytest.mark.slow


@pytest.fixture
def quick(tiny_config, tmp_path, monkeypatch):
    """Return a function that profiles the tiny recipe after a short warm-up."""
    monkeypatch.setattr(profiles, "MAX_WARM_S", 0.0)
    monkeypatch.setattr(profiles, "spin_less_beside_others", lambda *_: None)

    def measure(steps=2, skip=None, **changes):
        config = tiny_config(**changes)
        out = tmp_path / "out"
        return run_profile(config, steps=steps, skip=skip, out=out), out

    return measure


def test_steps_phases_and_classes_of_a_run(quick):
    found, out = quick(optim__kind="adamw")
    assert found.steps == 2
    assert found.first_step > 2
    assert {*found.phases_ms} == {"data", "forward", "backward", "optimizer", "logging"}
    rows = {row.kind: row for row in found.table}
    assert rows.keys() >= {"matmul", "elementwise", "optimizer", "copy"}
    assert sum(row.share for row in found.table) == pytest.approx(1.0)
    assert rows["matmul"].calls > 0
    assert 0 <= found.outside_ms < found.profiled_step_ms
    assert found.notes == ()
    files = {path.name for path in out.iterdir()}
    assert files == {"profile.json", "profile.txt", "trace.json.gz"}
    assert Profile.model_validate_json((out / "profile.json").read_text()) == found


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


def test_chosen_steps_are_profiled(quick):
    found, _ = quick(steps=1, skip=4, train__steps=5)  # up to the last step of the run
    assert found.first_step == 5
    assert found.step_ms is not None
    found, _ = quick(steps=1, skip=0)
    assert (found.first_step, found.step_ms) == (1, None)


def test_weights_in_host_memory_are_profiled(quick):
    try:
        found, _ = quick(steps=1, skip=1, parallel__offload="cpu")
    finally:
        disconnect()
    assert {row.kind for row in found.table} >= {"matmul", "optimizer"}


def test_steps_beyond_the_end_of_the_run_are_rejected(tiny_config):
    config, words = tiny_config(train__steps=10), "Steps 9 to 11 do not exist: the run has 10 steps"
    with pytest.raises(ConfigError, match=words) as bad:
        long_enough(config, 3, 8)
    assert "--skip 7" in bad.value.fix
    with pytest.raises(ConfigError, match="Step 11 does not exist"):
        long_enough(config, 1, 10)
    assert long_enough(config, 3, 7) == config
    assert long_enough(config, 6, None).train.steps == 16  # nobody chose these steps


def test_without_a_profiler_step_times_and_phases_remain(quick, monkeypatch):
    refused = RuntimeError("profiling is not permitted\nand more")
    monkeypatch.setattr(profiles, "profiling", Mock(side_effect=refused))
    found, out = quick()
    assert found.table is found.trace is None
    assert found.step_ms > 0
    assert found.phases_ms["forward"] > 0
    assert "profiling is not permitted." in found.notes[0]
    assert not (out / "trace.json.gz").exists()


def test_a_trace_that_the_disk_rejected_is_an_error(quick, monkeypatch):
    def cut(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"traceEvents": [')

    profiler = SimpleNamespace(export_chrome_trace=cut)
    monkeypatch.setattr(profiles, "profiling", lambda *_, **__: nullcontext(profiler))
    with pytest.raises(RunFailed, match="could not write its trace") as bad:
        quick()
    assert "full disk" in bad.value.fix


def test_several_processes_are_rejected(tiny_config, monkeypatch, tmp_path):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in (ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one of several"):
        run_profile(tiny_config(), steps=1, skip=0, out=tmp_path)


def test_a_full_disk_is_named_and_nothing_is_left_behind(quick, monkeypatch, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", "trace.json.gz")
    monkeypatch.setattr(profiles, "CheckedFile", Mock(side_effect=full))
    with pytest.raises(RunFailed, match=r"Cannot write trace\.json\.gz: No space left") as bad:
        quick()
    assert "Free space" in bad.value.fix
    monkeypatch.setattr(profiles, "summarise", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quick()
    assert [*(tmp_path / "out").iterdir()] == []


@pytest.mark.gpu
def test_a_gpu_has_kernels_and_a_snapshot(quick):
    found, out = quick(train__device="cuda")
    assert 0 < found.outside_ms < found.profiled_step_ms
    kinds = {row.kind: row for row in found.table}
    assert kinds["matmul"].calls > 0
    assert kinds["optimizer"].calls > 0
    assert (out / "memory-snapshot.pickle").stat().st_size > 0
    assert found.notes == ()
