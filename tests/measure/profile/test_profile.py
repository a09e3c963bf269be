"""Profiles of real steps on the CPU: the steps, the phases, the files; and when they go wrong."""

from __future__ import annotations

import errno
import gzip
import json

import pytest

from flatout.errors import ConfigError, RunFailed
from flatout.measure.profile import profile as profiles
from flatout.measure.profile.profile import Wanted, long_enough, run_profile
from flatout.measure.profile.report import Profile
from flatout.measure.steps import windows as shared

pytestmark = pytest.mark.slow


@pytest.fixture
def quick(tiny_config, tmp_path, monkeypatch):
    """Return a function that profiles the tiny recipe after a short warm-up."""
    monkeypatch.setattr(profiles, "MAX_WARM_S", 0.0)
    monkeypatch.setattr(profiles, "warn_of_busy_cores", lambda *_: None)

    def measure(steps=2, skip=None, **changes):
        config = tiny_config(**changes)
        out = tmp_path / "out"
        return run_profile(config, wanted=Wanted(steps, skip), out=out), out

    return measure


def test_steps_phases_classes_and_memory_of_a_run(quick):
    found, out = quick()
    assert found.steps == 2
    assert found.first_step > 2
    assert {*found.phases_ms} == {"data", "forward", "backward", "optimizer", "logging"}
    assert {row.kind for row in found.table} >= {"matmul", "elementwise", "optimizer", "copy"}
    assert sum(row.share for row in found.table) == pytest.approx(1.0)
    matmul = next(row for row in found.table if row.kind == "matmul")
    assert matmul.tflops > 0
    assert matmul.of_peak is not None
    assert {*found.memory.parts_gib} >= {"weights", "activations", "optimizer"}
    assert found.gaps is found.device_idle is None
    assert found.notes == ()
    assert sorted(path.name for path in out.iterdir()) == [
        "profile.json",
        "profile.txt",
        "trace.json.gz",
    ]
    assert Profile.model_validate_json((out / "profile.json").read_text()) == found


def test_the_trace_has_steps_phases_and_memory_counters(quick):
    found, out = quick()
    document = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))
    names = [event["name"] for event in document["traceEvents"]]
    assert f"flatout.step {found.first_step}" in names
    assert names.count("flatout.forward") == 2 * 2  # two micro-batches in each of two steps
    counters = [event for event in document["traceEvents"] if event["ph"] == "C"]
    assert max(counter["args"]["gradients"] for counter in counters) > 0
    assert {*counters[0]["args"]} >= {"weights", "activations", "gradients"}
    assert "flatout.forward" in names


def test_the_trace_has_what_perfetto_requires(quick):
    """Strict JSON, ranges that nest on each thread, numbers as counters, all at about one time."""
    _, out = quick()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = gzip.decompress((out / "trace.json.gz").read_bytes())
    events = json.loads(text, parse_constant=refuse)["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    assert all(isinstance(time_us, (int, float)) for time_us in times)
    assert max(times) - min(times) < 60e6
    assert all(event["name"] and "pid" in event for event in timed)
    threads = {}
    for event in sorted(timed, key=lambda one: (one["ts"], -one.get("dur", 0))):
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
            ends = threads.setdefault((event["pid"], event["tid"]), [])
            end_us = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or end_us <= ends[-1] + 1e-3, f"{event['name']} ends too late"
            ends.append(end_us)
    assert len(threads) > 1


def test_weights_and_states_have_their_exact_size(quick, tiny_config):
    found, _ = quick(optim__kind="adamw")
    weights, states = (found.memory.parts_gib[name] for name in ("weights", "optimizer"))
    assert states == pytest.approx(2 * weights, rel=0.05)


def test_chosen_steps_are_profiled(quick):
    found, _ = quick(steps=1, skip=4, train__steps=5)  # up to the last step of the run
    assert found.first_step == 5
    assert found.step_ms is not None


def test_the_very_first_step_can_be_profiled(quick):
    found, _ = quick(steps=1, skip=0)
    assert found.first_step == 1
    assert found.step_ms is None


def test_steps_beyond_the_end_of_the_run_are_refused(tiny_config):
    config = tiny_config(train__steps=10)
    with pytest.raises(
        ConfigError, match="Steps 9 to 11 do not exist: the run has 10 steps"
    ) as bad:
        long_enough(config, Wanted(3, 8))
    assert "--skip 7" in bad.value.fix
    with pytest.raises(ConfigError, match="Step 11 does not exist"):
        long_enough(config, Wanted(1, 10))
    assert long_enough(config, Wanted(3, 7)) == config
    assert long_enough(config, Wanted(6, None)).train.steps == 16  # nobody chose these steps


def test_without_a_profiler_step_times_and_phases_remain(quick, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("profiling is not permitted\nand more")

    monkeypatch.setattr(profiles, "profiling", refuse)
    found, out = quick()
    assert found.table is found.trace is found.memory is None
    assert found.step_ms > 0
    assert found.phases_ms["forward"] > 0
    assert "profiling is not permitted." in found.notes[0]
    assert not (out / "trace.json.gz").exists()


def test_a_trace_that_the_disk_refused_is_an_error(quick, monkeypatch):
    def cut(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"traceEvents": [')

    class Profiler:
        export_chrome_trace = staticmethod(cut)

    class Profiling:
        def __init__(self, *_, **__): ...

        def __enter__(self):
            return Profiler()

        def __exit__(self, *_): ...

    monkeypatch.setattr(shared, "profiling", Profiling)
    with pytest.raises(RunFailed, match="could not write its trace") as bad:
        quick()
    assert "full disk" in bad.value.fix


def test_several_processes_are_refused(tiny_config, monkeypatch, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="one of several"):
        run_profile(tiny_config(), wanted=Wanted(1, 0), out=tmp_path)


def test_a_full_disk_is_named(quick, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "trace.json.gz")

    monkeypatch.setattr(profiles, "CheckedFile", full)
    with pytest.raises(RunFailed, match=r"Cannot write trace\.json\.gz: No space left") as bad:
        quick()
    assert "Free space" in bad.value.fix


def test_nothing_is_left_behind_after_an_error(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(profiles, "summarise", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quick()
    assert [*(tmp_path / "out").iterdir()] == []


@pytest.mark.gpu
def test_a_gpu_has_kernels_gaps_and_a_snapshot(quick):
    found, out = quick(train__device="cuda")
    assert found.gaps
    assert 0 < found.device_idle < 1
    kinds = {row.kind: row for row in found.table}
    assert kinds["matmul"].tflops > 0
    assert kinds["optimizer"].calls > 0
    assert {*found.memory.parts_gib} >= {"weights", "activations", "optimizer"}
    assert found.memory.reserved_gib >= found.memory.gib
    assert (out / "memory-snapshot.pickle").stat().st_size > 0
    assert found.notes == ()
