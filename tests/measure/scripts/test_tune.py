"""`flatout tune -- python train.py` over made-up runs of a script, and what its results say."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest

import flatout
from flatout.errors import RunFailed
from flatout.measure import race, trial
from flatout.measure.attach.request import Screened, Site
from flatout.measure.evidence import Evidence
from flatout.measure.intervals import Figure
from flatout.measure.scripts import tune
from flatout.measure.scripts.changes import CHANGES, PASSIVE
from flatout.measure.scripts.tune import name_of
from flatout.measure.trial import Result, explained

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
    head: str = ""
    """What its file begins with: options, without which its edits do nothing."""
    on_busy: bool = False
    """Whether other processes use the cores."""
    runs: list[tuple[str, ...]] = field(default_factory=list)
    """The changes of each trial."""
    steps: list[int] = field(default_factory=list)
    now_s: float = 0.0

    def run(self, words, request, *, folder, limit_s, environment=(), **_):
        timing = request.timing
        takes_s = self.trial_s if timing else self.look_s
        self.now_s += min(takes_s, limit_s)
        if takes_s > limit_s:
            return explained(Result(steps=3, has_ended=False))
        if timing is None:
            return self.look(request.screen)
        text = (folder / "train.py").read_text()
        changes = request.changes
        if text != self.head + SOURCE:
            changes = tuple(name for name, mark in EDITS.items() if mark in text)
            changes = tuple(n for n in changes if not self.head or f"--{n}" in words)
            changes += ("no-anomaly",) * ("anomaly" not in text)
            changes = changes if self.patched is None else self.patched
        waits = ("passive",) * ("OMP_WAIT_POLICY" in environment)
        self.runs.append((*changes, *waits))
        steps, number = timing.steps + timing.warmup_steps, len(self.runs)
        self.steps.append(steps)
        if number == self.stops_in:
            raise KeyboardInterrupt
        if {*self.broken} & {*changes} or self.fails:
            return explained(Result(code=1, output="OutOfMemoryError: 3 GiB", process_s=takes_s))
        error = sum(self.wrong.get(name, 0.0) for name in changes)
        error += sum(self.drawn.get(name, 0.0) for name in changes) * (number * 7 % 5 - 2)
        error += self.noise * (number % 3) + self.seed_spread * (timing.seed_offset % 3)
        speed = math.prod(self.speed.get(name, 1.0) for name in changes) * 5 ** len(waits)
        step_s = self.step_s * self.jitter[number % len(self.jitter)] / speed
        slow = [50.0] if "compile" in changes else []
        return Result(
            step_s=[*slow, *[step_s] * (steps - len(slow))],
            losses=[5.0 * (1 + error)] * steps * self.has_losses,
            compiled=[0] if slow else [],
            warmup_steps=timing.warmup_steps,
            is_complete=True,
            process_s=takes_s,
        )

    def look(self, names):
        """Return what the unchanged script shows, and what the changes gain inside of it."""
        times = {"step_s": self.step_s, "compute_s": self.step_s}
        evidence = Evidence(source="script", device="cpu", other_busy_cores=2.0, **times)
        own = [one for one in names if one in {*self.speed, *self.wrong}]
        own = [one for one in own if not CHANGES[one].is_of_start]
        found = {
            name: Screened(
                screened=Figure(median=speed, low=0.98 * speed, high=1.02 * speed),
                compile_s=30.0 if name == "compile" else None,
                pays_after=634 if name == "compile" else None,
            )
            for name in own
            if (speed := self.speed.get(name, 1.2)) and name not in self.broken
        }
        kept = [name for name, one in found.items() if one.screened.low > 1.01]
        kept.sort(key=lambda name: -found[name].screened.median)
        failed = dict.fromkeys({*own} & {*self.broken}, "OutOfMemoryError: 3 GiB")
        seen = {"evidence": evidence, "sites": self.sites, "steps": 30}
        return Result(**seen, screened=found, kept=kept, failed=failed)

    @property
    def sites(self):
        names = {"model": "model", "torch": "torch"}
        at = partial(Site, file=str(self.path), names=names)
        n = self.head.count("\n")
        anomaly = at(
            kind="anomaly", name="set_detect_anomaly", line=n + 2, end_line=n + 2, end_column=39
        )
        built = {"line": n + 4, "end_line": n + 4, "column": 12, "end_column": 55}
        loss = at(kind="loss", name="the loss", line=n + 5, column=7, end_line=n + 6, end_column=0)
        return anomaly, at(kind="optimizer", name="SGD", **built), loss


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Return a function that tunes a made-up script with the changes that it knows."""

    def search(script, /, *, minutes=1e4, **options):
        monkeypatch.chdir(tmp_path)
        for name in (*PASSIVE, "GOMP_SPINCOUNT"):
            monkeypatch.delenv(name, raising=False)
        script.path = tmp_path / "train.py"
        script.path.write_text(script.head + SOURCE)
        monkeypatch.setattr(trial, "run_command", script.run)
        monkeypatch.setattr(
            tune, "waiting_beside_others", lambda _: dict(PASSIVE if script.on_busy else ())
        )
        for module in (tune, trial, race):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: script.now_s))
        names = ",".join({**script.speed, **script.wrong})
        options = {"script": ["train.py"], "only": names} | options
        return flatout.tune(minutes=minutes, **options)

    return search


def rows_of(found):
    return {row.name: row for row in found.changes}


def test_what_the_screening_kept_is_proved_together_and_the_rest_has_a_reason(tuned):
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
    assert rows["compile"].screened.median == pytest.approx(1.9)
    assert "pays after 634 steps" in found.summary()
    assert "OutOfMemoryError" in {row.name: row.reason for row in found.not_tried}["threads"]
    assert (rows["bf16"].taken, rows["bf16"].reason) == (False, "no clear gain")
    assert rows["malloc"].gain.median == pytest.approx(0.9, rel=0.01), "it needs a new process"
    assert "model.compile()" in found.patch
    patched = [run for run in script.runs if len(run) > 1 and "malloc" not in run]
    assert {*patched} == {("tf32", "compile")}, "only what they gain together is raced"


PARSER = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int)
args = parser.parse_args()
print(args.rows)
"""


def test_what_becomes_an_option_is_raced_and_told_with_it(tuned):
    script = Script(speed={"bf16": 1.5, "compile": 1.9}, head=PARSER)
    found = tuned(script, script=["train.py", "--rows", "2"])
    assert found.taken == ["compile", "bf16"]
    assert found.gain.median == pytest.approx(2.85, rel=0.01), "the patched files run with them"
    assert found.options == ["--bf16", "--compile"]
    assert "enabled=args.bf16" in found.patch
    assert "\n+if args.compile:\n+    model.compile()\n" in found.patch
    start = "Start it with its options: train.py --rows 2 --bf16 --compile"
    assert start in [line.replace("python ", "") for line in found.notes]
    found = tuned(Script(speed={"bf16": 1.5}, head=PARSER), script=["bash", "train.sh"])
    assert (found.options, "enabled" in found.patch) == ([], False)


def test_a_change_whose_losses_differ_or_are_not_seen_is_not_taken(tuned):
    script = Script(speed={"fused-optimizer": 1.5, "bf16": 1.5}, wrong={"bf16": 0.05})
    found = tuned(script, only="tf32,bf16")
    assert found.taken == []
    script = Script(speed={"tf32": 1.5, "bf16": 1.6}, wrong={"bf16": 0.05})
    found = tuned(script)
    assert found.taken == ["tf32"], "what may differ most is given up first"
    assert rows_of(found)["bf16"].reason == "in the end, its losses exceed the tolerance"
    assert found.gain.median == pytest.approx(1.5, rel=0.01)
    found = tuned(Script(speed={"bf16": 1.5}, has_losses=False))
    assert found.taken == []
    assert "no loss was seen" in rows_of(found)["bf16"].reason


def test_on_a_busy_machine_threads_sleep_and_what_that_gains_is_a_change(tuned):
    script = Script(speed={"tf32": 1.5, "passive-threads": 1.0}, on_busy=True)
    found = tuned(script)
    assert found.taken == ["tf32", "passive-threads"]
    assert found.gain.median == pytest.approx(1.5, rel=0.01)
    assert rows_of(found)["passive-threads"].gain.median == pytest.approx(5.0, rel=0.01)
    assert "OMP_WAIT_POLICY=passive" in found.summary()
    assert "--with tf32,passive-threads" in found.summary()


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
@pytest.mark.parametrize("minutes", [1, 2, 4])
def test_the_time_is_kept_and_a_patch_needs_one_round_beside_the_screening(tuned, minutes, trial_s):
    speed = {"tf32": 1.5, "bf16": 1.6, "malloc": 1.1}
    script = Script(speed=speed, trial_s=trial_s, look_s=trial_s)
    found = tuned(script, minutes=minutes)
    assert script.now_s <= 60 * minutes
    assert rows_of(found)["bf16"].screened.median == pytest.approx(1.6)
    assert bool(found.patch) is (60 * minutes >= 3 * trial_s)
    if found.patch:
        assert found.gain.median == pytest.approx(2.4, rel=0.01)
    else:
        assert "not proven" in found.summary()
    if 60 * minutes < 8 * trial_s:
        assert re.search(r"There was not enough time for .*malloc.*Add --minutes", found.summary())


def test_only_what_was_found_or_asked_for_is_left_behind(tuned, tmp_path):
    slow = Script(speed={"tf32": 0.9})
    assert tuned(slow).path == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert tuned(slow, out="kept").path == "kept"
    assert (tmp_path / "kept" / "tuning.json").is_file()
    tuned(Script(speed={"no-anomaly": 1.5}))
    assert (tmp_path / "tuned-train" / "changes.patch").is_file()
    (tmp_path / "x.patch").write_text("--- a/train.py of an earlier tune")
    tuned(slow, patch="x.patch")
    assert not (tmp_path / "tuned-train" / "changes.patch").exists(), "it is of an earlier tune"
    assert not (tmp_path / "x.patch").exists()


def test_ctrl_c_reports_what_was_measured(tuned, tmp_path):
    script = Script(speed={"tf32": 1.5, "bf16": 1.6}, stops_in=2)
    found = tuned(script)
    assert (found.ended_by_signal, found.exit_code) == (2, 130)
    assert len(script.runs) == 2
    assert rows_of(found)["bf16"].screened.median == pytest.approx(1.6, rel=0.01)
    assert found.summary().startswith("Interrupted")
    assert found.taken == []
    assert not (tmp_path / "tuned-train").exists(), "nothing was found"


def test_a_gain_whose_interval_holds_one_is_not_proven_and_no_patch_is_written(tuned, tmp_path):
    script = Script(speed={"tf32": 1.6}, jitter=(0.7, 1.2, 0.8, 1.2))
    found = tuned(script, patch="x.patch")
    assert found.taken == []
    assert found.patch == ""
    assert "Whether tf32 is faster is not proven. Add --minutes." in found.summary()
    assert "git apply" not in found.summary()
    assert not (tmp_path / "x.patch").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            Script(speed={"tf32": 1.5}, fails=True),
            "A trial of the unchanged script failed: OutOfMemoryError: 3 GiB",
        ),
        (Script(look_s=100.0), "cannot be measured: The process took longer than"),
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
    assert ("Apply it: git apply x.patch" in result.summary()) is (withheld is None)
    assert bool(result.taken) is (withheld is None)


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
