"""A recorded run is read as far as it is whole."""

from __future__ import annotations

import json
import shutil

import pytest

from flatout.errors import CheckpointError
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.storage.json_io import append_line
from flatout.training.run_dir import layout

RECORD = {
    "perf/step_ms": 100.0,
    "perf/data_wait_ms": 1.0,
    "perf/host_ms": 1.0,
    "perf/device_ms": 98.0,
    "perf/tokens_per_s": 1280.0,
    "perf/mfu": 0.4,
    "train/grad_norm": 1.0,
    "train/lr": 1e-3,
    "mem/peak_gib": 1.0,
}


@pytest.fixture
def run(tmp_path, tiny_config):
    """Write the files of a run of 400 steps, with some replaced; return its directory."""
    folder = tmp_path / "run"

    def make(*, records=None, events=(), exit_code=None, **changes):
        shutil.rmtree(folder, ignore_errors=True)
        config = tiny_config(train__steps=800, log__every=10)
        layout.write_config(folder, config, requested=config)
        lines = records or [
            RECORD
            | {
                "step": step,
                "tokens": 128 * step,
                "elapsed_s": 0.1 * step,
                "train/loss": 4 / (1 + step / 50),
                "train/epoch": step / 100,
            }
            | changes
            for step in range(10, 401, 10)
        ]
        start = {"event": "start", "device": "cpu", "world_size": 1, "parameters": 1000}
        for name, content in ((layout.METRICS, lines), (layout.EVENTS, [start, *events])):
            text = "".join(json.dumps(line) + "\n" for line in content)
            (folder / name).write_text(text)
        if exit_code is not None:
            layout.write_exit_code(folder, exit_code)
        return folder

    return make


def names(evidence):
    return [finding.name for finding in diagnosis_of(evidence).findings]


def test_a_healthy_run_has_no_findings(run):
    found = recorded_evidence(run())
    assert found.source == "recorded run"
    assert found.step_s == pytest.approx(0.1)
    assert found.steps == 400
    assert found.phases.compute_s == pytest.approx(0.098)
    assert found.phases.memory_bound_s is None
    assert found.phases.gc_s is None
    assert found.remaining_s == pytest.approx(40)
    assert found.epochs == pytest.approx(8)
    assert found.roofline.mfu == pytest.approx(0.4)
    assert found.notes == ()
    assert names(found) == []


def test_damaged_lines_are_omitted_and_mentioned(run):
    folder = run(events=[{"event": "recompiled", "graphs": 3, "compile_s": 1.0}])
    first, second = (folder / layout.EVENTS).read_text().splitlines()
    (folder / layout.EVENTS).write_text(f'{first}\n{{"event": "sa\n{{"x": 1}}\n{second}\n')
    with (folder / layout.METRICS).open("a") as file:
        file.write('{"step": 410, "perf/step_')
    found = recorded_evidence(folder)
    assert found.steps == 400
    assert found.counts.recompiles == 3 / 400
    assert found.notes == (
        "The last line of metrics.jsonl (line 41) is incomplete, skipped.",
        "events.jsonl has 1 damaged line (the first is line 2), skipped.",
    )
    assert found.notes == diagnosis_of(found).notes


def test_values_of_other_types_are_omitted(run):
    wrong = [
        {"step": None, "perf/step_ms": 3},
        {"perf/step_ms": 5},
        {"step": 405},
        RECORD | {"step": 1e308},
        RECORD | {"step": 410, "perf/step_ms": "x", "train/loss": []},
    ]
    events = [
        {"event": "save", "blocked_ms": "long"},
        {"event": "recompiled", "graphs": [1], "compile_s": {}, "reasons": 5},
        {"event": "start", "peak_tflops": "fast", "peak_source": 7},
    ]
    folder = run(events=events)
    for line in wrong:
        append_line(folder / layout.METRICS, line)
    found = recorded_evidence(folder)
    assert (found.steps, found.roofline.peak_tflops) == (400, None)
    assert found.notes == ("3 records of metrics.jsonl without a step, skipped.",)
    assert names(found) == []


def test_a_phase_that_no_record_has_is_not_measured(run):
    record = {name: value for name, value in RECORD.items() if not name.endswith("_ms")}
    steps = [record | {"step": step, "perf/step_ms": 100.0} for step in (10, 20, 30)]
    phases = recorded_evidence(run(records=steps)).phases
    assert phases.data_wait_s is phases.compute_s is phases.logging_s is None


def test_the_rate_is_that_of_the_typical_step(run):
    speeds = ((10, 900.0), (20, 100.0), (30, 100.0), (40, 300.0))
    records = [
        RECORD | {"step": step, "perf/step_ms": ms, "perf/tokens_per_s": 128_000 / ms}
        for step, ms in speeds
    ]
    found = recorded_evidence(run(records=records))
    assert found.step_s == pytest.approx(0.1)
    assert found.roofline.tokens_per_s == pytest.approx(128 / 0.1)


def test_recorded_waits_saves_and_evaluations_are_named(run):
    waits = run(**{"perf/data_wait_ms": 40.0, "perf/device_ms": 59.0})
    assert names(recorded_evidence(waits)) == ["slow-data"]
    saves = [{"event": "save", "step": 10 * n, "blocked_ms": 400.0} for n in range(40)]
    assert names(recorded_evidence(run(events=saves))) == ["slow-save"]
    slow = [
        RECORD
        | {"step": step, "train/loss": 4 / step, "elapsed_s": 0.2 * step}
        | ({"val/loss": 3.0} if step % 50 == 0 else {})
        for step in range(10, 401, 10)
    ]
    found = recorded_evidence(run(records=slow))
    assert found.phases.evaluation_s == pytest.approx(0.1)
    assert names(found) == ["frequent-evaluation"]


def test_saves_are_judged_only_where_there_are_enough(run):
    def saves(number):
        return [{"event": "save", "step": 10, "blocked_ms": 9000.0}] * number

    few = recorded_evidence(run(events=saves(2)))
    assert few.phases.checkpoint_s is None
    assert few.step_s == pytest.approx(0.1)
    short = [RECORD | {"step": step, "elapsed_s": step / 10} for step in (10, 20)]
    assert recorded_evidence(run(events=saves(4), records=short)).phases.checkpoint_s is None
    assert names(recorded_evidence(run(events=saves(4)))) == ["slow-save"]
    assert recorded_evidence(run(records=short)).phases.checkpoint_s == 0


def test_a_compiler_that_fell_back_or_recompiles_is_named(run):
    graph = {"event": "recompiled", "graphs": 1, "compile_s": 1.0, "reasons": ["size mismatch"]}
    (finding,) = diagnosis_of(recorded_evidence(run(events=[graph] * 20))).findings
    assert finding.name == "recompiles"
    assert finding.figures["reason"] == "size mismatch"
    on = {"event": "speedup", "name": "compile", "on": True, "reason": "fast"}
    events = [on, on | {"on": False, "reason": "no compiler"}]
    found = recorded_evidence(run(events=events))
    assert found.compile_fallback == "no compiler"
    assert names(found) == ["compile-failure"]
    events += [{"event": "resume"}, on | {"on": False, "reason": "-"}]
    assert recorded_evidence(run(events=events)).compile_fallback is None


def test_an_idle_gpu_is_named_by_its_utilisation(run):
    folder = run(**{"gpu/util_pct": 30.0})
    (folder / layout.EVENTS).unlink()
    layout.append_event(folder, "start", device="cuda", world_size=1)
    found = recorded_evidence(folder)
    assert found.phases.compute_s is None
    assert names(found) == ["idle-gpu"]


@pytest.mark.parametrize(
    ("kind", "name", "verdict"),
    [
        ("OutOfMemory", "out-of-memory", "It broke."),
        ("MissingPackage", "missing-package", "It broke."),
        ("DataError", "no-data", "It broke."),
        ("DiskFull", "failure", "The run fails at step 410: It broke."),
        ("CheckpointError", "failure", "The run fails at step 410: It broke."),
    ],
)
def test_a_run_that_failed_shows_why(run, kind, name, verdict):
    """The last record has no loss: float16 overflowed there, or no token was a target."""
    events = [{"event": "error", "kind": kind, "what": "It broke.", "fix": "Mend it."}]
    folder = run(events=events, exit_code=1)
    append_line(folder / layout.METRICS, RECORD | {"step": 410, "elapsed_s": 41.0})
    (finding,) = diagnosis_of(recorded_evidence(folder)).findings
    assert (finding.name, finding.verdict) == (name, verdict)


def test_a_run_that_diverged_says_so(run):
    events = [{"event": "error", "kind": "Diverged", "what": "NaN.", "fix": "Mend it."}]
    folder = run(events=events, exit_code=1)
    assert names(recorded_evidence(folder)) == ["unstable-training"]
    (run() / layout.METRICS).unlink()
    with pytest.raises(CheckpointError, match="no record of a step"):
        recorded_evidence(folder)
