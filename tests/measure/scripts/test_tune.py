"""`flatout tune -- python train.py` over made-up runs of a script, and what its results say."""

from __future__ import annotations

import html
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest

import flatout
from flatout.errors import RunFailed
from flatout.measure import race, trial
from flatout.measure.attach.request import Answer, Site
from flatout.measure.evidence import Evidence
from flatout.measure.scripts import tune
from flatout.measure.scripts.tune import name_of
from flatout.measure.trial import Ran, last_words

SOURCE = """import torch
torch.autograd.set_detect_anomaly(True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2)).sum()
loss.backward()
"""
EDITS = {"tf32": "matmul_precision", "compile": ".compile()", "bf16": "autocast"}
"""What is in the patched file, by change."""


@dataclass
class Script:
    """A made-up script: what changes do to its step and its losses."""

    speed: dict[str, float] = field(default_factory=dict)
    """How many times faster a change makes it."""
    broken: tuple[str, ...] = ()
    """Changes that fail."""
    wrong: dict[str, float] = field(default_factory=dict)
    """Relative error of the losses with a change."""
    drawn: dict[str, float] = field(default_factory=dict)
    """Relative error of the losses with a change that draws other numbers in every run."""
    noise: float = 0.0
    """Relative difference of the losses from run to run."""
    seed_spread: float = 0.0
    jitter: Sequence[float] = (1.0, 1.004)
    """Factors of the step times, run after run."""
    has_losses: bool = True
    step_s: float = 0.1
    look_s: float = 10.0
    trial_s: float = 10.0
    stops_in: int | None = None
    """The trial in which Ctrl+C comes."""
    patched: tuple[str, ...] | None = None
    """Changes that the patched files really make, if other than the edits."""
    fails: bool = False
    """Whether the unchanged script fails in trials."""
    runs: list[tuple[str, ...]] = field(default_factory=list)
    """The changes of each trial."""
    steps: list[int] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    now_s: float = 0.0

    def run(self, words, request, *, folder, limit_s, **_):
        timing, began_s = request.timing, self.now_s
        takes_s = self.trial_s if timing else self.look_s
        self.now_s += min(takes_s, limit_s)
        if takes_s > limit_s:
            return Ran(Answer(steps=3), None, "", False)
        if timing is None:
            times = {"step_s": self.step_s, "compute_s": self.step_s}
            seen = {"evidence": Evidence(source="script", device="cpu", **times)}
            return Ran(Answer(**seen, sites=self.sites, steps=30), 0, "", True)
        text = (folder / "train.py").read_text()
        changes = request.changes
        if text != SOURCE:
            changes = tuple(name for name, mark in EDITS.items() if mark in text)
            changes += ("no-anomaly",) * ("anomaly" not in text)
            changes = changes if self.patched is None else self.patched
        self.runs.append(changes)
        self.starts_s.append(began_s)
        steps, number = timing.steps + timing.warmup_steps, len(self.runs)
        self.steps.append(steps)
        if number == self.stops_in:
            raise KeyboardInterrupt
        if {*self.broken} & {*changes} or self.fails:
            return Ran(Answer(), 1, "OutOfMemoryError: 3 GiB", True, takes_s)
        error = sum(self.wrong.get(name, 0.0) for name in changes)
        error += sum(self.drawn.get(name, 0.0) for name in changes) * (number * 7 % 5 - 2)
        error += self.noise * (number % 3) + self.seed_spread * (timing.seed_offset % 3)
        speed = math.prod(self.speed.get(name, 1.0) for name in changes)
        step_s = self.step_s * self.jitter[number % len(self.jitter)] / speed
        slow = [50.0] if "compile" in changes else []
        answer = Answer(
            step_s=[*slow, *[step_s] * (steps - len(slow))],
            losses=[5.0 * (1 + error)] * steps * self.has_losses,
            compiled=[0] if slow else [],
            warmup_steps=timing.warmup_steps,
            is_complete=True,
        )
        return Ran(answer, 0, "", True, takes_s)

    @property
    def sites(self):
        names = {"model": "model", "torch": "torch"}
        at = partial(Site, file=str(self.path), names=names)
        anomaly = at(kind="anomaly", name="set_detect_anomaly", line=2, end_line=2, end_column=39)
        built = {"line": 4, "end_line": 4, "column": 12, "end_column": 55}
        loss = at(kind="loss", name="the loss", line=5, column=7, end_line=6, end_column=0)
        return anomaly, at(kind="optimizer", name="SGD", **built), loss


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Return a function that tunes a made-up script with the changes that it knows."""

    def search(script, /, *, minutes=1e4, **options):
        monkeypatch.chdir(tmp_path)
        script.path = tmp_path / "train.py"
        script.path.write_text(SOURCE)
        for module in (tune, trial):
            monkeypatch.setattr(module, "run_command", script.run)
        for module in (tune, trial, race):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: script.now_s))
        names = ",".join({**script.speed, **script.wrong})
        options = {"script": ["train.py"], "only": names} | options
        return flatout.tune(minutes=minutes, **options)

    return search


def rows_of(found):
    return {row.name: row for row in found.changes}


def test_winners_are_added_by_gain_and_the_rest_has_a_reason(tuned):
    script = Script(
        speed={"tf32": 1.2, "compile": 1.9, "bf16": 1.0, "malloc": 0.9, "threads": 1.5},
        broken=("threads",),
    )
    found = tuned(script)
    rows = rows_of(found)
    assert found.taken == ["compile", "tf32"]
    assert found.gain.median == pytest.approx(2.28, rel=0.01)
    assert found.gain.low > 2.2
    assert found.gain_losses.within_tolerance
    assert rows["compile"].gain.median == pytest.approx(1.9, rel=0.01)
    assert rows["tf32"].against == "+ compile"
    assert "OutOfMemoryError" in rows["threads"].reason
    assert not rows["bf16"].taken
    assert rows["malloc"].first_gain == pytest.approx(0.9, rel=0.01)
    assert "model.compile()" in found.patch


def test_a_change_whose_losses_differ_or_are_not_seen_is_not_taken(tuned):
    script = Script(speed={"fused-optimizer": 1.5, "bf16": 1.5}, wrong={"fused-optimizer": 0.01})
    found = tuned(script)
    assert found.taken == ["bf16"]
    row = rows_of(found)["fused-optimizer"]
    assert (row.within_tolerance, row.reason) == (False, "its losses exceed the tolerance")
    assert row.loss_difference == pytest.approx(0.01)
    found = tuned(Script(speed={"bf16": 1.5}, has_losses=False))
    assert found.taken == []
    assert "no loss was seen" in rows_of(found)["bf16"].reason


@pytest.mark.parametrize(
    ("script", "is_taken"),
    [
        (Script(speed={"compile": 2.0}, wrong={"compile": 0.01}, noise=0.005), True),
        (Script(speed={"compile": 2.0}, drawn={"compile": 0.01}, seed_spread=0.02), True),
        (Script(speed={"compile": 2.0}, wrong={"compile": 0.01}, seed_spread=0.02), False),
        (Script(speed={"compile": 2.0}, wrong={"compile": 0.3}, seed_spread=0.02), False),
        (Script(speed={"compile": 2.0}, wrong={"compile": math.nan}), False),
    ],
    ids=["noise of one seed", "other draws", "always worse", "beyond both", "nan"],
)
def test_losses_are_judged_by_the_noise_of_the_unchanged_script(tuned, script, is_taken):
    assert ("compile" in tuned(script).taken) is is_taken


@pytest.mark.parametrize("trial_s", [5.0, 10.0, 25.0])
@pytest.mark.parametrize("minutes", [1, 2, 4, 6])
def test_the_time_is_kept_and_the_first_changes_are_measured_in_its_first_half(
    tuned, minutes, trial_s
):
    speed = {"tf32": 1.5, "bf16": 1.6, "compile": 1.7}
    script = Script(speed=speed, trial_s=trial_s, look_s=trial_s)
    found = tuned(script, minutes=minutes)
    assert script.now_s <= 60 * minutes
    if trial_s <= 10 * minutes:
        first = next(start for start, run in zip(script.starts_s, script.runs, strict=True) if run)
        assert first + trial_s <= 30 * minutes
    if 60 * minutes >= 3 * trial_s:
        assert any(row.first_gain for row in found.changes)
    if 60 * minutes > 12 * trial_s:
        assert found.taken
        assert found.verified.low > 1
    elif not found.taken:
        assert found.patch == ""
        assert "not proven" in found.summary() or "Add --minutes" in found.summary()


def test_only_what_was_found_or_asked_for_is_left_behind(tuned, tmp_path):
    slow = Script(speed={"tf32": 0.9})
    assert tuned(slow).path == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert tuned(slow, out="kept").path == "kept"
    assert (tmp_path / "kept" / "tuning.json").is_file()
    tuned(Script(speed={"no-anomaly": 1.5}))
    assert (tmp_path / "tuned-train" / "changes.patch").is_file()
    (tmp_path / "x.patch").write_text("of an earlier tune")
    tuned(slow, patch="x.patch")
    assert not (tmp_path / "tuned-train" / "changes.patch").exists(), "it is of an earlier tune"
    assert not (tmp_path / "x.patch").exists()


def test_all_changes_are_measured_while_none_is_promising(tuned):
    speed = dict.fromkeys(["tf32", "bf16", "malloc", "threads", "compile"], 0.9)
    found = tuned(Script(speed=speed), minutes=2)
    assert len(found.changes) == 5
    late = tuned(Script(speed=speed, trial_s=25.0, look_s=25.0), minutes=1.5).summary()
    assert re.search(r"There was not enough time for .*compile.*Add --minutes", late)


def test_the_report_of_a_tuned_script_starts_with_the_changes_and_they_are_settings(
    tuned, tmp_path
):
    tuned(Script(speed={"bf16": 1.6, "compile": 1.9}))
    flatout.report("tuned-train", out="page.html")
    body = (tmp_path / "page.html").read_text().partition("<main>")[2].partition("<script")[0]
    text = " ".join(html.unescape(re.sub("<[^>]+>", " ", body)).split())
    assert text.startswith("Changes ")
    assert "Differences before after compile no yes bf16 no yes" in text
    tuned(Script(speed={"bf16": 0.6}))
    flatout.report("tuned-train", out="page.html")
    text = (tmp_path / "page.html").read_text()
    assert "settings of these runs are the same" not in text


def test_ctrl_c_reports_what_was_measured(tuned, tmp_path):
    script = Script(speed={"tf32": 1.5, "bf16": 1.6, "compile": 1.7}, stops_in=6)
    found = tuned(script)
    assert (found.ended_by_signal, found.exit_code) == (2, 130)
    assert len(script.runs) == 6
    assert rows_of(found)["bf16"].first_gain == pytest.approx(1.6, rel=0.01)
    assert found.summary().startswith("Interrupted")
    assert found.taken == []
    assert not (tmp_path / "tuned-train").exists(), "nothing was found"
    early = tuned(Script(speed={"tf32": 1.5}, stops_in=1))
    assert early.changes == []
    assert early.exit_code == 130
    assert "No change was measured." in early.summary()
    assert "--minutes" not in early.summary()


def test_a_gain_whose_interval_holds_one_is_not_proven_and_no_patch_is_written(tuned, tmp_path):
    script = Script(speed={"tf32": 1.6}, jitter=(0.7, 1.2, 0.8, 1.2))
    found = tuned(script, patch="x.patch")
    assert found.taken == []
    assert found.patch == ""
    assert "no clear gain" in found.summary()
    assert "git apply" not in found.summary()
    assert not (tmp_path / "x.patch").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(fails=True), "A trial of the unchanged script failed: OutOfMemoryError: 3 GiB"),
        (Script(look_s=100.0), "too few steps until its time was up"),
    ],
)
def test_a_script_that_cannot_be_measured_is_an_error(tuned, script, message):
    with pytest.raises(RunFailed, match=message):
        tuned(script, only="tf32", minutes=1)


def test_long_steps_make_short_trials(tuned):
    script = Script(speed={"tf32": 1.5}, step_s=6.0, trial_s=40.0)
    assert tuned(script, minutes=10).taken == ["tf32"]
    assert max(script.steps) <= 6
    script = Script(speed={"tf32": 1.5}, step_s=0.01)
    tuned(script)
    assert max(script.steps) == 304


@pytest.mark.parametrize(
    ("patched", "withheld"),
    [
        (("no-anomaly",), None),
        (("malloc",), "no clear gain"),
        (("no-anomaly", "tf32"), "losses exceed"),
        (("threads",), "OutOfMemoryError"),
    ],
)
def test_a_patch_is_given_only_if_the_patched_script_keeps_the_gain(
    tuned, tmp_path, patched, withheld
):
    script = Script(
        speed={"no-anomaly": 1.5, "malloc": 0.8, "threads": 1.0},
        wrong={"tf32": 0.5},
        broken=("threads",),
        patched=patched,
    )
    result = tuned(script, patch="x.patch")
    assert (withheld or "None") in str(result.withheld)
    assert bool(result.patch) is (withheld is None)
    assert (tmp_path / "x.patch").exists() is (withheld is None)
    assert bool(result.taken) is (withheld is None)


def test_pairs_take_turns(tuned):
    """Whichever of two runs first gains nothing by it."""
    script = Script(speed={"tf32": 1.02, "bf16": 1.03})
    tuned(script)
    turns = [run for run in script.runs[4:8] if len(run) < 2]
    assert turns == [(), ("bf16",), ("bf16",), ()]


def test_a_failure_without_a_message_has_the_line_of_the_user(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def f():\n    assert 1 == 2\nf()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    reason = f"AssertionError at {script}:2: assert 1 == 2"
    assert last_words(f"started\n{done.stderr.strip()}") == reason
    assert last_words(f"{done.stderr}ValueError: mine") == "ValueError: mine"
    assert last_words("killed") == "killed"


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
