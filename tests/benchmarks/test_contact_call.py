"""Three calls of nine minutes make all essential measurements and never lose one.

Measured durations decide which steps still fit into a call.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.hardware import Gpu, probe

pytestmark = pytest.mark.slow

H200 = replace(probe(), gpus=(Gpu("NVIDIA H200", 139.0, (9, 0), "580"),))


class Machine:
    """A fake GPU machine on which steps take time but do nothing."""

    def __init__(self, kit, monkeypatch, tmp_path, *, pace=1.0, seed=0):
        self.kit, self.tmp_path, self.pace, self.now_s, self.random = (
            kit,
            tmp_path,
            pace,
            0.0,
            random.Random(seed),
        )
        calls = importlib.import_module("contact_call")
        self.steps_taken, self.killed_at_s, self.crashes = [], float("inf"), set()
        monkeypatch.setattr(kit.throughput, "probe", lambda: H200)
        monkeypatch.setattr(kit, "probe", lambda: H200)
        monkeypatch.setattr(kit.throughput, "random_data", lambda folder, **_: folder)
        monkeypatch.setattr(kit.throughput, "text_data", lambda folder, **_: folder)
        monkeypatch.setattr(kit.throughput, "run_apart", self.run_apart)
        monkeypatch.setattr(
            kit.throughput.Availability,
            "is_missing",
            lambda available, kind: kind in ("litgpt", "nanochat"),
        )
        monkeypatch.setattr(
            calls,
            "environment",
            lambda limit_s, *, tiny: (
                self.advance(9.0) and {"status": "ok", "python": "3.12", "packages": {}}
            ),
        )
        monkeypatch.setattr(
            calls,
            "gpu_tests",
            lambda limit_s, *, tiny: (
                self.advance(115.0) and {"status": "ok", "failed": [], "seconds": 115.0}
            ),
        )
        monkeypatch.setattr(
            calls, "ladder", lambda *words, minutes, **_: self.advance(60 * minutes)
        )

    def advance(self, seconds):
        if self.now_s + seconds > self.killed_at_s:
            self.now_s = self.killed_at_s
            raise KeyboardInterrupt
        self.now_s += seconds
        return True

    def run_apart(self, spec, limit_s):
        config, rows = spec["config"], spec["rows"] or 64
        layers, tokens = config["model"]["num_layers"], config["data"]["seq_len"] * rows
        steps_s = 28 * tokens / 300e3 * layers / 12
        compile_s = 0.0 if spec["kind"] == "people" else 40.0 * layers / 12
        seconds = self.pace * (14.0 + compile_s + 9.0 * ("profile_steps" in spec)) + steps_s
        seconds *= self.random.uniform(0.85, 1.15)
        self.steps_taken.append((spec["kind"], seconds))
        self.advance(min(seconds, limit_s))
        if seconds > limit_s:
            return {"status": "timed-out", "reason": "It had not ended."}
        if len(self.steps_taken) in self.crashes:
            return {"status": "failed", "reason": "The process exited with code -11."}
        row = {
            "tokens_per_s": 1e5 + (spec["rows"] or 0),
            "peak_gib": 10.0,
            "mfu": 0.5,
            "roof_tflops": 790.0,
            "steps_ms": [1.0],
            "speedups": [],
        }
        profile = (
            {
                "profile": {
                    "steps": 3,
                    "wall_ms": 9.0,
                    "groups": {"matmul": 8.0, "idle": 1.0},
                    "kernels": [],
                }
            }
            if "profile_steps" in spec
            else {}
        )
        return {"status": "ok", "reason": None, **row, **profile}

    def call(self, number, results, *words):
        """Make one call, and return its duration and the table that it prints."""
        arguments = self.kit.parser().parse_args(
            [
                "--call",
                str(number),
                "--results",
                str(results),
                "--nanogpt",
                str(self.tmp_path),
                "--minutes",
                "9",
                *words,
            ]
        )
        results.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=self.tmp_path))
        contact = self.kit.Contact(
            self.kit.session(arguments, scratch),
            self.kit.Results(results),
            arguments,
            self.now_s,
            lambda: self.now_s,
        )
        start_s = self.now_s
        contact.run(contact.next_call() if number == "next" else number)
        return self.now_s - start_s, contact.table(number if number != "next" else 1)


@pytest.fixture
def machine(kit, monkeypatch, tmp_path):
    return Machine(kit, monkeypatch, tmp_path)


def rows_of(results):
    path = results / "throughput.json"
    return json.loads(path.read_text())["measurements"] if path.exists() else []


def figures(results):
    return {
        (row["work"], row["entry"], row["rows"], row["round"]): row["tokens_per_s"]
        for row in rows_of(results)
        if row["status"] == "ok"
    }


def core(kit, plan):
    named = [
        step
        for call in plan.CALLS.values()
        for step in plan.steps(call, lambda entry: entry.rows, kit.throughput.is_selected)[0]
    ]
    return {(step.entry.work, step.entry.name) for step in named if step.entry}


@pytest.mark.parametrize("pace", [0.5, 1.0, 1.3])
def test_three_calls_of_nine_minutes_measure_all_essential_entries(
    kit, plan, monkeypatch, tmp_path, pace
):
    machine = Machine(kit, monkeypatch, tmp_path, pace=pace)
    results = tmp_path / "results"
    for number in (1, 2, 3):
        seconds, lines = machine.call(number, results)
        assert seconds <= 540
        assert len(lines) <= 40
    assert core(kit, plan) <= {
        (row["work"], row["entry"]) for row in rows_of(results) if row["status"] == "ok"
    }
    contact = json.loads((results / "contact.json").read_text())
    assert set(contact["profiles"]) == set(plan.PROFILED)
    assert len(list(results.iterdir())) <= 8


def test_a_slow_machine_ends_in_time_and_lists_what_is_left(kit, monkeypatch, tmp_path):
    machine = Machine(kit, monkeypatch, tmp_path, pace=2.2)
    seconds, lines = machine.call(2, tmp_path / "results")
    assert seconds <= 540
    assert re.search(
        r"No time was left for these steps of this call: .*gpt2-124m-32k-wide-heads/set", lines[-1]
    )
    assert {row["entry"] for row in rows_of(tmp_path / "results")} >= {"set", "nanogpt"}


@pytest.mark.parametrize("seed", range(2))
def test_measurements_survive_kills_and_copies(kit, plan, monkeypatch, tmp_path, seed):
    machine = Machine(kit, monkeypatch, tmp_path, seed=seed)
    results, known = tmp_path / "results-0", {}
    for number in range(1, 16):
        machine.killed_at_s = machine.now_s + machine.random.uniform(20, 600)
        try:
            machine.call("next", results)
        except KeyboardInterrupt:
            assert "begun" in json.loads((results / "contact.json").read_text())
        assert known.items() <= figures(results).items()
        known = figures(results)
        fresh = tmp_path / f"results-{number}"
        fresh.mkdir()
        for path in results.iterdir():
            (fresh / path.name).write_bytes(path.read_bytes())
        results = fresh
    assert core(kit, plan) <= {(work, entry) for work, entry, *_ in known}


def test_a_call_resumes_and_continues_with_other_calls(kit, machine, tmp_path):
    results = tmp_path / "results"
    machine.call(1, results, "--minutes", "6")
    first = figures(results)
    assert {work for work, *_ in first} == {"gpt2-124m"}
    machine.call(1, results)
    assert first.items() < figures(results).items()
    machine.call(1, results)
    assert {work for work, *_ in figures(results)} > {"gpt2-124m"}


def test_a_measurement_that_crashes_with_the_profiler_is_repeated_without_it(machine, tmp_path):
    machine.crashes = {1}
    machine.call(1, tmp_path, "--only", "gpt2-124m/set", "--minutes", "7")
    (row, *_) = [row for row in rows_of(tmp_path) if row["entry"] == "set"]
    assert (row["status"], "profiled" in row, len(machine.steps_taken) >= 2) == ("ok", False, True)
    profiles = json.loads((tmp_path / "contact.json").read_text())["profiles"]
    assert profiles["gpt2-124m/set"]["failed"] == "The process exited with code -11."
    machine.call(3, tmp_path, "--only", "gpt2-124m/set", "--minutes", "7")
    assert (
        json.loads((tmp_path / "contact.json").read_text())["profiles"]["gpt2-124m/set"]["groups"][
            "matmul"
        ]
        == 8.0
    )


def test_failures_are_retried_only_with_other_code(kit, machine, monkeypatch, tmp_path):
    machine.crashes = {1}
    one = ["--only", "gpt2-124m/recipe"]
    machine.call(1, tmp_path, *one)
    machine.call(1, tmp_path, *one)
    assert [row["status"] for row in rows_of(tmp_path)] == ["failed"]
    monkeypatch.setattr(kit.throughput, "code_digest", lambda *, ours: "other")
    machine.call(1, tmp_path, *one)
    assert [row["status"] for row in rows_of(tmp_path)] == ["ok"]
    monkeypatch.setattr(kit.throughput, "code_digest", lambda *, ours: "a third")
    machine.call(1, tmp_path, *one)
    assert len(machine.steps_taken) == 2


def test_a_step_that_takes_too_long_is_stopped_and_retried_last(kit, machine, tmp_path):
    one = ["--only", "gpt2-124m/recipe,gpt2-124m/people"]
    machine.pace = 30.0
    machine.call(1, tmp_path, *one, "--minutes", "8.9")
    (row,) = [row for row in rows_of(tmp_path) if row["entry"] == "recipe"]
    assert row["status"] == "timed-out"
    assert "A later call retries it" in row["reason"]
    machine.pace = 1.0
    machine.call(1, tmp_path, *one)
    assert {(row["entry"], row["status"]) for row in rows_of(tmp_path)} == {
        ("people", "ok"),
        ("recipe", "ok"),
    }
    assert machine.steps_taken[-1][0] == "flatout"


def test_a_failed_ladder_is_recorded(kit, machine, monkeypatch, tmp_path):
    def fails(*_, **__):
        raise SystemExit("no room")

    monkeypatch.setattr(importlib.import_module("contact_call"), "ladder", fails)
    _, lines = machine.call(4, tmp_path, "--only", "none")
    assert json.loads((tmp_path / "contact.json").read_text())["ladder"]["failed"] == ["no room"]
    assert lines[-1].startswith("All core steps of this call are done")


def test_a_step_that_ran_out_of_time_is_the_first_of_the_next_call(kit, machine, tmp_path):
    one = ["--only", "gpt2-124m/recipe,gpt2-124m/people"]
    machine.pace = 8.0
    machine.call(1, tmp_path, *one, "--minutes", "4.6")
    assert next((row["entry"], row["status"]) for row in rows_of(tmp_path)) == (
        "recipe",
        "timed-out",
    )
    machine.pace = 1.0
    start = len(machine.steps_taken)
    machine.call(1, tmp_path, *one)
    assert machine.steps_taken[start][0] == "flatout"


def test_figures_of_another_device_are_not_mixed(kit, machine, monkeypatch, tmp_path):
    machine.call(1, tmp_path, "--only", "gpt2-124m/recipe")
    other = replace(H200, gpus=(Gpu("NVIDIA H100", 80.0, (9, 0), "580"),))
    monkeypatch.setattr(kit, "probe", lambda: other)
    with pytest.raises(SystemExit, match=r"NVIDIA H200.*--results"):
        machine.call(1, tmp_path)


def test_entries_near_a_target_are_measured_twice_more(kit, machine, tmp_path):
    report = importlib.import_module("contact_report")
    target = next(
        target
        for target in report.TARGETS
        if (target.work, target.what) == ("gpt2-124m", "tokens_per_s")
    )
    row = {
        "work": "gpt2-124m",
        "rows": 64,
        "round": 0,
        "status": "ok",
        "peak_gib": 1.0,
        "roof_tflops": 790.0,
        "device": "NVIDIA H200",
    }
    measured = importlib.import_module("throughput_report").Measurements
    near = measured([{**row, "entry": "set", "tokens_per_s": 0.98 * target.least}], tiny=False)
    far = measured([{**row, "entry": "set", "tokens_per_s": 0.9 * target.least}], tiny=False)
    assert [(entry.name, rows) for entry, rows in report.near_targets(near)] == [("set", 64)]
    assert report.near_targets(far) == []


def test_estimates_follow_the_measured_pace(plan):
    entry = next(
        entry for entry in plan.ENTRIES if (entry.work, entry.name) == ("gpt2-124m", "set")
    )
    other = next(
        entry for entry in plan.ENTRIES if (entry.work, entry.name) == ("gpt2-700m", "set")
    )
    one, two = plan.Step("measure", entry, 64), plan.Step("measure", other, 16)
    spent = {
        "step": one.name,
        "entry": ["gpt2-124m", "set"],
        "guess_s": 80.0,
        "seconds": 40.0,
        "status": "ok",
    }
    assert plan.Estimates([]).expected_s(two) == plan.guess_s(two)
    assert plan.Estimates([]).limit_s(two) >= plan.LIMIT_S
    learned = plan.Estimates([spent])
    assert (learned.expected_s(one), learned.expected_s(two)) == (40.0, plan.guess_s(two) / 2)
    assert learned.limit_s(two) < plan.LIMIT_S
    stopped = plan.Estimates([{**spent, "status": "timed-out", "seconds": 200.0}])
    assert (stopped.expected_s(one), stopped.expected_s(two)) == (240.0, 2.5 * plan.guess_s(two))
