"""The search for changes of a script, over made-up trials."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from flatout.errors import ConfigError, RunFailed
from flatout.measure.experiments.records import Left
from flatout.measure.experiments.report import NO_TIME
from flatout.measure.scripts import tune
from flatout.measure.scripts.patch import Patch
from flatout.measure.scripts.request import Answer
from flatout.measure.scripts.tune import (
    Point,
    Search,
    difference,
    last_words,
    name_of,
    ratio,
    scaled,
)
from flatout.measure.scripts.tuning import ScriptTuning
from flatout.progress import SILENT


@dataclass
class Script:
    """A made-up script: what changes do to its step and its losses."""

    speed: dict[str, float] = field(default_factory=dict)
    """How many times faster a change makes it."""
    broken: frozenset[str] = frozenset()
    """Changes that fail."""
    wrong: dict[str, float] = field(default_factory=dict)
    """Relative error of the losses with a change."""
    noise: float = 0.0
    """Relative difference of the losses from run to run."""
    seed_spread: float = 0.0
    patched: tuple[str, ...] = ()
    """Changes that the patched files really make."""
    runs: list[Point] = field(default_factory=list)
    now_s: float = 0.0

    def run(self, search, point):
        self.runs.append(point)
        number = len(self.runs)
        self.now_s += 10
        changes = self.patched if point.is_patched else point.changes
        speed = math.prod(self.speed.get(name, 1.0) for name in changes)
        if point.words:
            speed /= 1.0 + 0.3 * math.log2(int(point.words[-1]) / 8)
        error = sum(self.wrong.get(name, 0.0) for name in changes)
        error += self.noise * (number % 3) + self.seed_spread * (point.seed_offset / 1000 % 3)
        answer = Answer(
            step_s=[(1 + 0.004 * (number % 2)) / speed] * 16,
            losses=[5.0 * (1 + error)] * 16,
            compiled=[0] if "compile" in changes else [],
            problem="OutOfMemoryError: 3 GiB" if self.broken & {*changes} else None,
        )
        search.done.append((point, answer))
        return answer


@pytest.fixture
def search(monkeypatch):
    """Return a function that searches among the changes of a made-up script."""

    def searched(script, *, minutes=1e6):
        monkeypatch.setattr(Search, "run", lambda search, point: script.run(search, point))
        monkeypatch.setattr(tune.time, "monotonic", lambda: script.now_s)
        with SILENT.task("") as task:
            found = Search(["train.py"], None, 16, 0.0, 60 * minutes, 60.0, task)
            found.screen(list({**script.speed, **script.wrong}))
            found.add()
            return found

    return searched


def test_winners_are_added_by_gain_and_the_rest_has_a_reason(search):
    script = Script(
        speed={"tf32": 1.2, "compile": 1.9, "bf16": 1.0, "malloc": 0.9, "threads": 1.5},
        broken=frozenset({"threads"}),
    )
    found = search(script)
    assert found.taken == ("compile", "tf32")
    rows = found.rows
    assert rows["compile"].gain.median == pytest.approx(1.9, rel=0.01)
    assert rows["tf32"].against == ["compile"]
    assert "OutOfMemoryError" in rows["threads"].reason
    assert not rows["bf16"].taken
    assert rows["malloc"].first_gain == pytest.approx(0.9, rel=0.01)


def test_a_change_that_alters_the_losses_is_not_taken(search):
    script = Script(speed={"fused-optimizer": 1.5, "bf16": 1.5}, wrong={"fused-optimizer": 0.01})
    found = search(script)
    assert found.taken == ("bf16",)
    row = found.rows["fused-optimizer"]
    assert row.within_tolerance is False
    assert row.loss_difference == pytest.approx(0.01)
    assert "losses exceed" in row.reason


@pytest.mark.parametrize(
    ("script", "is_taken"),
    [
        (Script(speed={"compile": 2.0}, wrong={"compile": 0.01}, noise=0.005), True),
        (Script(speed={"compile": 2.0}, wrong={"compile": 0.01}, seed_spread=0.02), True),
        (Script(speed={"compile": 2.0}, wrong={"compile": 0.3}, seed_spread=0.02), False),
        (Script(speed={"compile": 2.0}, wrong={"compile": math.nan}), False),
    ],
    ids=["noise of one seed", "spread over seeds", "beyond both", "nan"],
)
def test_losses_are_judged_by_the_noise_of_the_unchanged_script(search, script, is_taken):
    assert ("compile" in search(script).taken) is is_taken


def test_blocks_are_compiled_only_where_the_model_cannot_be(search):
    both = {"compile": 1.5, "compile-each-block": 2}
    assert "compile-each-block" not in search(Script(speed=both)).rows
    script = Script(speed=both, broken=frozenset({"compile"}))
    assert search(script).taken == ("compile-each-block",)


def test_the_time_limit_omits_what_does_not_fit_but_the_best_is_repeated(search):
    script = Script(speed={"tf32": 1.5, "compile": 1.7, "bf16": 1.6})
    found = search(script, minutes=0.9)
    assert [*found.rows] == ["tf32", "compile"]
    assert found.taken == ("compile",)
    assert "time was up" in found.rows["tf32"].reason
    assert script.now_s <= 90


def test_a_script_that_fails_unchanged_is_an_error(search):
    script = Script(speed={"tf32": 1.5})
    script.run = lambda search, point: Answer(problem="boom")
    with pytest.raises(RunFailed, match="boom"):
        search(script)


@pytest.mark.parametrize(
    ("patched", "withheld"),
    [
        (("no-anomaly",), None),
        (("malloc",), "not faster"),
        (("no-anomaly", "tf32"), "losses exceed"),
        (("threads",), "OutOfMemoryError"),
    ],
)
def test_a_patch_is_given_only_if_the_patched_script_keeps_the_gain(
    search, monkeypatch, patched, withheld
):
    script = Script(
        speed={"no-anomaly": 1.5, "malloc": 0.8, "threads": 1.0},
        wrong={"tf32": 0.5},
        broken=frozenset({"threads"}),
        patched=patched,
    )
    found = search(script)
    assert found.taken == ("no-anomaly",)
    monkeypatch.setattr(tune, "patch_of", lambda *_: Patch(diff="--- a", by_hand=[]))
    found.scratch = SimpleNamespace(source=None)
    result = found.finish([], "cpu")
    assert (withheld or "None") in str(result.get("withheld"))
    assert bool(result["patch"]) is (withheld is None)
    assert result.get("gain") == result.get("verified")


def test_larger_batches_are_measured_by_samples_or_with_less_accumulation(search):
    found = search(Script(speed={"tf32": 1.0}))
    found.command = ["train.py", "--batch", "8"]
    found.grow_batch("--batch", None)
    gains = [row.gain.median for name, row in found.rows.items() if name.startswith("--batch")]
    assert gains[0] == pytest.approx(2 / 1.3, rel=0.02)
    assert all("samples per second" in row.reason for row in found.rows.values() if row.gain)
    with pytest.raises(ConfigError, match="no --accumulate"):
        found.grow_batch("--batch", "--accumulate")


def test_arguments_are_found_and_replaced_in_both_forms():
    words = ["train.py", "--batch", "8", "--batch-size=16", "--lr=8", "-c", "a\nb"]
    assert scaled(words, "--batch", 2) == (16, ["train.py", "--batch", "16", *words[3:]])
    assert scaled(words, "--batch-size", 0.5)[1][3] == "--batch-size=8"
    assert scaled(words, "--batch-size", 1) == (16, words)
    for flag in ("--b", "--lr2", "train.py"):
        with pytest.raises(ConfigError, match="with a number"):
            scaled(words, flag, 1)


def test_a_failure_without_a_message_has_the_line_of_the_user(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def f():\n    assert 1 == 2\nf()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    reason = f"AssertionError at {script}:2: assert 1 == 2"
    assert last_words(f"started\n{done.stderr.strip()}") == reason
    assert last_words(f"{done.stderr}ValueError: mine") == "ValueError: mine"
    assert last_words("killed") == "killed"


def test_a_ratio_omits_the_start_and_what_compiles():
    slow = Answer(step_s=[9.0] * 4 + [2.0] * 6)
    fast = Answer(step_s=[1.0] * 4 + [1.0, 1.0, 50.0, 1.0, 1.0, 1.0], compiled=[6])
    assert ratio(fast, slow) == pytest.approx(2.0)
    assert ratio(slow, fast) == pytest.approx(0.5)


def test_losses_that_are_missing_or_no_numbers_are_infinitely_apart():
    assert difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert difference([], [1.0]) == math.inf
    assert difference([math.nan], [1.0]) == math.inf


def test_repeats_stop_once_they_decide(search):
    """The first trial of a change counts, unless winners were added since."""
    script = Script(speed={"tf32": 3.0, "bf16": 2.0})
    found = search(script)
    assert [len(group) for group in found.noise[1:]] == [2, 2]
    assert found.rows["tf32"].gain.low > 2


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 1", "train"),
        ("torchrun --nproc-per-node 2 src/run.py", "run"),
        ("python -m package", "package"),
    ],
)
def test_results_are_named_after_the_script(command, name):
    assert name_of(command.split()) == name


def test_order_alternates_within_pairs(search):
    script = Script(speed={"tf32": 1.02, "bf16": 1.03})
    search(script)
    assert [point.changes for point in script.runs[5:9]] == [(), ("bf16",), ("bf16",), ()]


def test_changes_that_there_was_no_time_for_are_named():
    late = [Left(name=name, reason=NO_TIME) for name in ("bf16", "compile")]
    found = ScriptTuning(
        changes=[],
        taken=[],
        written=[],
        written_outside=[],
        command=["python", "train.py"],
        machine="a CPU",
        verdict="It is slow.",
        step_ms=20.0,
        steps=16,
        num_trials=3,
        not_tried=[*late, Left(name="tf32", reason="There is no GPU.")],
        loss_noise=None,
        path="tuned-train",
        wall_s=60.0,
    )
    assert "There was not enough time for bf16, compile. Add --minutes." in found.summary()
    assert "tf32" not in found.summary()
