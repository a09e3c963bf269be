"""What `auto` would choose is tried where a recipe on a CPU has chosen otherwise."""

from __future__ import annotations

import pytest

from flatout.assembly.selection import select
from flatout.errors import ConfigError
from flatout.hardware.machine import GIB, Machine
from flatout.measure import trial
from flatout.measure.diagnose import diagnose as diagnosing
from flatout.measure.diagnose.alternatives import applied, with_alternatives
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.evidence import Evidence, Failure
from flatout.measure.trial import Result
from flatout.progress import SILENT

MANY = "batch.rows_per_device=8 batch.accumulate=1"
MACHINE = Machine("a CPU", 2, 24.0, (), "3.12")


@pytest.fixture
def tried(tiny_config, monkeypatch):
    """Return the evidence after the trials, and their settings, of a made-up CPU.

    By default, `auto` is on, with `extra`. `rates` are those of the trials in turn.
    """

    def measure(requested="auto", *, rows=8, on=None, extra=(), rates=(1000,) * 4, **facts):
        trials, left = [], [*rates]
        asked = tiny_config(speedups=requested, model__vocab_size=257)
        batch = {"batch.rows_per_device": rows, "batch.accumulate": 8 // rows}
        size = {"batch.tokens_per_step": 8 * asked.data.seq_len}
        auto = select(asked.with_values(batch | size | {"speedups": "auto"}), MACHINE)
        speedups = (*([one.name for one in auto if one.on] if on is None else on), *extra)

        def run(config, timing, limit_s, folder):
            assert limit_s > 0
            assert not folder.exists()
            assert config.batch.rows_per_device * config.batch.accumulate == 8
            assert config.train.precision == asked.train.precision
            name = [MANY] if config.batch.rows_per_device != rows else []
            name += ["speedups=auto"] if config.speedups == "auto" else []
            trials.append((" ".join(name), timing.seconds + timing.warmup_s))
            rate = left.pop(0)
            if rate is None:
                return Result(status="failed", reason="It fails.")
            return Result(step_s=[1.0], tokens_per_step=rate)

        monkeypatch.setattr(trial, "try_recipe", run)
        known = {
            "source": "measured run",
            "config": asked.with_values(
                {**batch, **size, "speedups": ",".join(speedups) or "none"}
            ).with_values({"train.precision": "bf16"}),
            "machine": MACHINE,
            "device": "cpu",
            "speedups": speedups,
            "step_s": 0.1,
            "free_gib": 20.0,
            "rows_that_fit": 64,
            "counterfactual_s": {"synthetic-data": 0.099},
        }
        return with_alternatives(Evidence(**known | facts), asked, 4.0, SILENT), trials

    return measure


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ""),
        ({"requested": "auto,-compile"}, ""),  # auto would not compile either
        ({"rows": 1}, MANY),
        ({"rows": 4}, MANY),
        ({"rows": 1, "rows_that_fit": 1}, ""),
        ({"requested": "auto,+checkpointing", "extra": ["checkpointing"]}, "speedups=auto"),
        ({"requested": "checkpointing", "on": ["checkpointing"], "free_gib": 1024 / GIB}, ""),
        ({"requested": "none", "on": ()}, "speedups=auto"),
        ({"requested": "none", "on": (), "rows": 2}, f"{MANY} speedups=auto"),
        ({"requested": "auto,-prefetch", "on": ["pretokenised"]}, "speedups=auto"),
        ({"on": ["pretokenised"]}, ""),  # a measurement here may have turned others off
        ({"rows": 1, "device": "cuda"}, ""),
        ({"rows": 1, "step_s": None, "failure": Failure(kind="error", message="Oh.")}, ""),
    ],
)
def test_only_what_the_recipe_does_not_leave_to_auto_is_tried(tried, changes, wanted):
    found, trials = tried(**changes)
    assert [name for name, _ in trials] == (["", wanted, wanted, ""] if wanted else [])
    assert sum(seconds for _, seconds in trials) <= 4 * 4.0
    assert found.counterfactual_s.keys() == {"synthetic-data", *filter(None, [wanted])}
    assert diagnosis_of(found).findings == () or changes.get("failure")


def test_a_gain_is_that_of_the_slowest_trial_against_the_fastest_of_the_recipe(tried):
    rates = [900, 3000, 2000, 1000]
    found, _ = tried(rows=2, rates=rates, checkpoint_s=0.02, evaluation_s=0.02)
    assert found.counterfactual_s[MANY] == pytest.approx(0.03 + 0.04), "saves take as long"
    (finding,) = (one for one in diagnosis_of(found).findings if one.name == "slow-settings")
    assert finding.verdict == f"With {MANY}, a step takes 30% less."
    assert finding.share == pytest.approx(0.3)
    (fix,) = finding.fixes
    assert fix.overrides == {"batch.rows_per_device": 8, "batch.accumulate": 1}
    changed = found.config.with_values(fix.overrides)
    assert changed.batch.tokens_per_step == 8 * found.config.data.seq_len


@pytest.mark.parametrize("rates", [[1000, 1200, 1050, 1000], [1000, 1200, None, 1000]])
def test_a_gain_within_the_noise_or_a_failed_trial_is_no_finding(tried, rates):
    found, _ = tried(rows=1, rates=rates)
    assert diagnosis_of(found).findings == ()


def test_slow_steps_are_not_repeated(tried):
    _, trials = tried(rows=1, step_s=3.0)
    assert trials == []


@pytest.mark.slow
def test_small_micro_batches_are_found_by_trials_of_a_real_recipe(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    small = {"batch.rows_per_device": 1, "batch.tokens_per_step": 16 * 16}
    config = tiny_config().with_values(small)
    evidence = diagnosing.diagnose_recipe(config, seconds=1.0)
    (name,) = (one for one in evidence.counterfactual_s if "=" in one)
    assert name == "batch.rows_per_device=16 batch.accumulate=1"
    findings = {one.name: one for one in diagnosis_of(evidence).findings}
    assert findings["slow-settings"].fixes[0].overrides["batch.rows_per_device"] == 16
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("speedups", "edit", "expected"),
    [
        ("auto", "-compile", "auto,-compile"),
        ("auto,-compile", "+compile", "auto,+compile"),
        (["prefetch", "compile"], "-compile", "prefetch"),
        (["prefetch", "compile"], "+tf32", "prefetch,compile,tf32"),
        ("none", "+tf32", "tf32"),
    ],
)
def test_edits_of_the_speedups_are_applied(tiny_config, speedups, edit, expected):
    config = tiny_config(speedups=speedups)
    assert applied(config, {"speedups": edit}).speedups == expected
    with pytest.raises(ConfigError):
        applied(config, {"optim.lr": -1})
