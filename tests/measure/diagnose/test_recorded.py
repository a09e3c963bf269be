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
RECOMPILED = {"event": "recompiled", "graphs": 1, "compile_s": 1.0, "reasons": ["size mismatch"]}
ON = {"event": "speedup", "name": "compile", "on": True, "reason": "fast"}


@pytest.fixture
def run(tmp_path, tiny_config):
    """Write the files of a run of 400 steps, with some replaced; return its directory."""
    folder = tmp_path / "run"

    def make(*, records=None, events=(), exit_code=None, start=None, **changes):
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
        begin = {"event": "start", "device": "cpu", "world_size": 1, "parameters": 1000}
        begin |= start or {}
        for name, content in ((layout.METRICS, lines), (layout.EVENTS, [begin, *events])):
            text = "".join(json.dumps(line) + "\n" for line in content)
            (folder / name).write_text(text)
        if exit_code is not None:
            layout.write_exit_code(folder, exit_code)
        return folder

    return make


def names(folder):
    return [one.name for one in diagnosis_of(recorded_evidence(folder)).findings]


def test_a_healthy_run_has_no_findings(run):
    found = recorded_evidence(run())
    assert (found.source, found.steps, found.notes) == ("recorded run", 400, ())
    numbers = (found.step_s, found.compute_s, found.remaining_s, found.epochs, found.mfu)
    assert numbers == pytest.approx((0.1, 0.098, 40, 8, 0.4))
    assert found.memory_bound_s is found.gc_s is None
    assert diagnosis_of(found).findings == ()


def test_damaged_lines_are_omitted_and_mentioned(run):
    folder = run(events=[{"event": "recompiled", "graphs": 3, "compile_s": 1.0}])
    first, second = (folder / layout.EVENTS).read_text().splitlines()
    (folder / layout.EVENTS).write_text(f'{first}\n{{"event": "sa\n{{"x": 1}}\n{second}\n')
    with (folder / layout.METRICS).open("a") as file:
        file.write('{"step": 410, "perf/step_')
    found = recorded_evidence(folder)
    assert found.steps == 400
    assert found.recompiles == 3 / 400
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
        {
            "event": "start",
            "peak_tflops": "fast",
            "peak_source": 7,
            "environment": {"threads": "x"},
        },
        {"event": "speedup", "name": [1], "on": "yes"},
    ]
    folder = run(events=events)
    for line in wrong:
        append_line(folder / layout.METRICS, line)
    found = recorded_evidence(folder)
    assert (found.steps, found.peak_tflops) == (400, None)
    assert found.notes == ("3 records of metrics.jsonl without a step, skipped.",)
    assert names(folder) == []


def test_the_rate_is_that_of_the_typical_step_and_absent_phases_are_unknown(run):
    speeds = ((10, 900.0), (20, 100.0), (30, 100.0), (40, 300.0))
    records = [
        {"step": step, "perf/step_ms": ms, "perf/tokens_per_s": 128_000 / ms} for step, ms in speeds
    ]
    found = recorded_evidence(run(records=records))
    assert (found.step_s, found.tokens_per_s) == pytest.approx((0.1, 1280))
    assert found.data_wait_s is found.compute_s is found.logging_s is None


def saves(number, blocked_ms=9000.0):
    return [{"event": "save", "step": 10, "blocked_ms": blocked_ms}] * number


SHORT = [RECORD | {"step": step, "elapsed_s": step / 10} for step in (10, 20)]
SCORING = [
    RECORD
    | {"step": step, "train/loss": 4 / step, "elapsed_s": 0.2 * step}
    | ({"val/loss": 3.0} if step % 50 == 0 else {})
    for step in range(10, 401, 10)
]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"perf/data_wait_ms": 40.0, "perf/device_ms": 59.0}, ["slow-data"]),
        ({"events": saves(40, 400.0)}, ["slow-save"]),
        ({"events": saves(4)}, ["slow-save"]),
        ({"events": saves(2)}, []),  # too few to judge by
        ({"events": saves(4), "records": SHORT}, []),
        ({"records": SCORING}, ["frequent-evaluation"]),
        ({"events": [RECOMPILED] * 20}, ["recompiles"]),
        ({"events": [ON, ON | {"on": False, "reason": "no compiler"}]}, ["compile-failure"]),
        ({"events": [ON, {"event": "resume"}, ON | {"on": False, "reason": "-"}]}, []),
        ({"start": {"device": "cuda"}, "gpu/util_pct": 30.0}, ["idle-gpu"]),
    ],
)
def test_what_the_files_show_is_named(run, files, expected):
    assert names(run(**files)) == expected


def test_saves_and_evaluations_are_part_of_the_step_if_they_are_known(run):
    few = recorded_evidence(run(events=saves(2)))
    assert (few.checkpoint_s, few.step_s) == (None, pytest.approx(0.1))
    assert recorded_evidence(run(records=SHORT)).checkpoint_s == 0
    assert recorded_evidence(run(records=SCORING)).evaluation_s == pytest.approx(0.1)


def test_recorded_windows_say_how_busy_the_machine_was(run):
    def recorded(*others):
        lines = [
            {"step": number, "elapsed_s": 2.0 * number, "perf/step_ms": 2e3}
            | ({} if value is None else {"cpu/other_cores": value, "cpu/cores": 4})
            for number, value in enumerate(others, 1)
        ]
        return recorded_evidence(run(records=lines, start={"environment": {"threads": 2}}))

    busy = recorded(3.0, None, 3.6)
    assert (busy.cores, busy.threads) == (4, 2)
    assert busy.other_busy_cores == pytest.approx(3.3)
    told = diagnosis_of(busy)
    assert told.verdict.startswith("Other processes kept 3.3 of 4 cores busy, which left too few")
    assert "evidence  82% of the step" in told.summary()
    assert "has taken few steps" in busy.notes[-1]
    idle = recorded(0.1, 0.3)
    assert (idle.other_busy_cores, idle.cores) == (pytest.approx(0.2), None)
    assert recorded(None, None).other_busy_cores is None


@pytest.mark.parametrize(
    ("kind", "name", "verdict"),
    [
        ("OutOfMemory", "out-of-memory", "It broke."),
        ("MissingPackage", "failure", "It broke."),
        ("DataError", "failure", "It broke."),
        ("DiskFull", "failure", "The run fails at step 410: It broke."),
        ("Diverged", "unstable-training", "It broke."),
    ],
)
def test_a_run_that_failed_shows_why(run, kind, name, verdict):
    """The last record has no loss: float16 overflowed there, or no token was a target."""
    why = {"kind": kind, "what": "It broke.", "fix": "Mend it."}
    folder = run(events=[{"event": "exit", "code": 1, **why}])
    append_line(folder / layout.METRICS, RECORD | {"step": 410, "elapsed_s": 41.0})
    (finding,) = diagnosis_of(recorded_evidence(folder)).findings
    assert (finding.name, finding.verdict) == (name, verdict)
    (run() / layout.METRICS).unlink()
    with pytest.raises(CheckpointError, match="no record of a step"):
        recorded_evidence(folder)
