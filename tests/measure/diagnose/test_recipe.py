"""`flatout diagnose RECIPE` trains it in a process of its own, and names planted faults."""

from __future__ import annotations

import sys

import pytest

from flatout.config.documents import dump_yaml
from flatout.errors import ConfigError, OutOfMemory
from flatout.hardware.machine import Machine
from flatout.measure.attach.lines import failure_of
from flatout.measure.attach.request import Request
from flatout.measure.diagnose import recipe
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.recipe import diagnose_recipe, prepared, with_auto
from flatout.measure.evidence import Evidence, Failure
from flatout.measure.trial import Result, explained, run_command
from flatout.progress import SILENT
from flatout.training.checkpoint import catalog
from flatout.training.run import run_training

pytestmark = pytest.mark.slow

MACHINE = {"busy-machine", "cpu-threads"}
"""Findings about the machine on which the tests run."""
SIZE = {
    "model.d_model": 96,
    "model.num_heads": 2,
    "data.seq_len": 64,
    "batch.tokens_per_step": 2048,
    "batch.rows_per_device": 16,
}
"""Large enough that operations are not tiny, and logging takes little."""
PLANTED = """
import gc, torch
from flatout.models import transformer

gc.freeze()  # a collection then takes a moment

class Faulty(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        loss, num_valid = super().forward(tokens_BT, targets_BT, doc_ids_BT)
        if loss.item() > 1e9 or float(num_valid) < 0:
            raise ValueError
        torch.cuda.empty_cache()
        gc.collect()
        return loss, num_valid

class Unbuilt(transformer.MODEL):
    def __init__(self, *_, **__):
        raise RuntimeError("mine")

class Broken(transformer.MODEL):
    def forward(self, *_):
        raise ModuleNotFoundError("No module named 'imaginary'", name="imaginary")

class Hungry(transformer.MODEL):
    def forward(self, *_):
        torch.empty(2**50)
"""
SLOW = """
import time
from flatout.data.load.batches import ShardReader
from flatout.training.checkpoint.savers import Saver
from flatout.training import evaluation

def slowed(plain, seconds):
    return lambda *a, **k: (time.sleep(seconds), plain(*a, **k))[1]

ShardReader.read = slowed(ShardReader.read, 0.2)
Saver.save = slowed(Saver.save, 0.4)
evaluation.score = slowed(evaluation.score, 0.4)
"""


@pytest.fixture
def measured(tiny_config, tmp_path, monkeypatch):
    """Return the findings by name, and the evidence, of a recipe with planted faults."""
    monkeypatch.setattr(recipe, "with_auto", lambda found, *_: found)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted", raising=False)  # another test's, whose file is gone
    (tmp_path / "planted.py").write_text(PLANTED)

    def measure(**changes):
        values = {key.replace("__", "."): value for key, value in changes.items()}
        monkeypatch.chdir(tmp_path)
        config = tiny_config().with_values(SIZE | values)
        found = diagnose_recipe(config, seconds=0.5)
        findings = {one.name: one for one in diagnosis_of(found).findings}
        assert not [*tmp_path.glob(".diagnose-*")]
        return {name: findings[name] for name in findings.keys() - MACHINE}, found

    return measure


def test_the_phases_of_a_healthy_recipe_fill_the_step(measured):
    found, evidence = measured(train__steps=40)
    assert not [one for one in found.values() if one.harm in ("fails", "spoils")]
    assert evidence.source == "measured run"
    assert evidence.steps >= 5
    steps = {step for step, _ in evidence.losses}
    assert max(steps) <= 40, "steps that the recipe does not have tell nothing about it"
    assert 0.7 < sum(evidence.phase_shares().values()) <= 1.01
    assert evidence.compute_s > 0
    assert evidence.optimizer_s > 0
    assert evidence.data_wait_s > 0
    assert evidence.communication_s is evidence.pageable_copies is evidence.clock_share is None
    assert evidence.tokens_per_s > 0
    assert evidence.counterfactual_s["synthetic-data"] > 0
    assert {share.kind for share in evidence.kernels} >= {"matmul", "elementwise"}
    assert evidence.notes == ()


@pytest.mark.thorough
def test_slow_data_saves_and_evaluations_are_named(measured, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import slow_parts")
    (tmp_path / "slow_parts.py").write_text(SLOW)
    found, evidence = measured(
        checkpoint__every_steps=2, train__eval_every=2, speedups="auto,-prefetch,-compile"
    )
    assert found.keys() >= {"slow-data", "slow-save", "frequent-evaluation"}
    assert evidence.counterfactual_s["synthetic-data"] < evidence.step_s
    assert evidence.checkpoint_s == pytest.approx(0.2, abs=0.1)
    fixes = [fix.overrides for fix in found["frequent-evaluation"].fixes]
    (rarer,) = [values for values in fixes if "train.eval_every" in values]
    assert 2 < rarer["train.eval_every"] <= evidence.planned_steps


def test_faults_of_the_users_own_model_are_named_with_their_lines(measured):
    found, evidence = measured(model__kind="planted:Faulty", batch__rows_per_device=32)
    assert found.keys() >= {"host-sync", "empty-cache", "garbage-collection"}
    assert evidence.syncs - evidence.expected_syncs == 2
    assert evidence.site("sync").text.startswith("if loss.item() > 1e9")
    assert evidence.site("empty-cache").text == "torch.cuda.empty_cache()"
    assert evidence.site("gc").text == "gc.collect()"


@pytest.mark.quick_cases(
    "failure-no-data-None-changes4",
)
@pytest.mark.parametrize(
    ("name", "kind", "line", "changes"),
    [
        ("out-of-memory", "out-of-memory", "torch.empty(2**50)", {"model__kind": "Hungry"}),
        ("failure", "missing-package", "raise ModuleNotFound", {"model__kind": "Broken"}),
        ("failure", "error", 'raise RuntimeError("mine")', {"model__kind": "Unbuilt"}),
        ("unstable-training", "diverged", None, {"optim__lr": 1e30, "schedule__warmup": 0}),
        ("failure", "no-data", None, {"data__path": "absent"}),
    ],
)
def test_a_recipe_that_fails_shows_why_and_where(measured, name, kind, line, changes):
    if "model__kind" in changes:
        changes = {"model__kind": f"planted:{changes['model__kind']}"}
    found, evidence = measured(optim__clip=0, **changes)
    assert found.keys() == {name}
    failure = evidence.failure
    assert failure.kind == kind
    assert line is None or failure.site.text.startswith(line)
    assert ".diagnose-" not in failure.message
    assert kind != "missing-package" or "package imaginary is not installed" in failure.message


@pytest.mark.parametrize(
    ("code", "has_ended", "output", "kind", "message"),
    [
        (-9, True, "Oh.", "killed", "the usual cause is too little memory"),
        (-11, True, "Oh.", "error", "killed by SIGSEGV"),
        (3, True, "Oh.", "error", "Oh."),
        (None, False, "", "hang", "took longer than 90 s"),
    ],
)
def test_the_end_of_the_process_is_evidence(code, has_ended, output, kind, message):
    ended = {"code": code, "output": output, "has_ended": has_ended, "process_s": 90.0}
    failure = explained(Result(**ended)).failure
    assert failure.kind == kind
    assert message in failure.message


@pytest.mark.thorough
def test_a_compiler_that_fails_is_named(measured, tmp_path):
    text = "import os; os.environ['CXX'] = '/bin/false'"
    (tmp_path / "sitecustomize.py").write_text(text)
    found, evidence = measured(speedups="auto,+compile")
    assert "compile-failure" in found
    assert evidence.compile_fallback
    assert "compile" not in evidence.speedups


def test_a_users_own_run_under_diagnosis_keeps_its_checkpoints_and_its_data(tiny_config, tmp_path):
    path = tmp_path / "my.yaml"
    values = {"train.steps": 100_000, "checkpoint.every_steps": 3, "checkpoint.keep": 9}
    path.write_text(dump_yaml(tiny_config().with_values(SIZE | values).to_dict()))
    words = [sys.executable, "-m", "flatout", "train", str(path), "--run-dir", str(tmp_path / "r")]
    found = run_command(words, Request(seconds=0.5), is_captured=True)
    assert (found.is_complete, found.code, found.once) == (True, 0, {})
    assert "synthetic-data" not in found.evidence.counterfactual_s
    saved = catalog.steps(tmp_path / "r")
    assert len(saved) > 2
    assert not any(step % 3 for step in saved)


def test_the_stated_warmup_is_kept_in_the_longer_run(tiny_config, tmp_path):
    config = tiny_config(schedule__warmup=0.5, train__steps=40)
    evidence, stated = prepared(config, tmp_path)
    assert stated.schedule.warmup == 20
    assert evidence.planned_steps == 40
    assert evidence.estimated_gib > 0
    assert evidence.train_tokens > 0


def test_padding_counts_neither_in_the_tokens_of_a_step_nor_in_its_epochs(tiny_config, tmp_path):
    sizes = {"data__seq_len": 64, "batch__tokens_per_step": 512, "train__epochs": 2}
    buckets = "auto,-compile,+length-buckets"
    config = tiny_config(speedups=buckets, train__steps=None, **sizes)
    evidence, _ = prepared(config, tmp_path)
    done = run_training(config, tmp_path / "run")
    trained = done["tokens"] / done["steps"]
    assert trained < 0.95 * config.batch.tokens_per_step
    assert evidence.tokens_per_step == pytest.approx(trained, rel=0.02)
    assert evidence.epochs == pytest.approx(2, rel=0.1)


def test_errors_of_flatout_keep_their_fix():
    found = failure_of(ConfigError("It is wrong.", fix="Correct it."), 3)
    told = (found.kind, found.message, found.fix, found.step)
    assert told == ("error", "It is wrong.", "Correct it.", 3)
    assert failure_of(OutOfMemory("No.", fix="Less."), 0).kind == "out-of-memory"


MANY = "batch.rows_per_device=8 batch.accumulate=1"
SMALL = {
    "model__vocab_size": 257,
    "batch__tokens_per_step": 128,
    "batch__rows_per_device": "auto",
}


@pytest.fixture
def tried(tiny_config, monkeypatch):
    """Return the evidence after the race of a recipe, resolved, against what `auto` chooses.

    Their names are those of the trials, whose rates are `rates`, in turn.
    """

    def measure(asked, *, rates=(1000,) * 4, **facts):
        trials, left = [], [*rates]
        requested = tiny_config(**SMALL | asked)
        config = requested.with_values({"train.device": "cpu"})
        machine = Machine("a CPU", 2, 24.0, (), "3.12")
        monkeypatch.setattr(recipe, "probe", lambda: machine)
        data = recipe.open_dataset(config)
        config = recipe.resolve_on(machine, config, data).config

        def run(setting, timing, limit_s):
            assert setting.batch.rows_per_device * setting.batch.accumulate == 8
            words = [MANY] * (setting.batch != config.batch)
            trials.append(" ".join([*words, *["speedups=auto"] * (setting.speedups == "auto")]))
            rate = left.pop(0)
            if rate is None:
                return Result(failed={"x": "It fails."})
            return Result(step_s=[1.0 / rate])

        monkeypatch.setattr(recipe, "try_recipe", run)
        known = {"source": "measured run", "config": config, "device": "cpu", "step_s": 0.1}
        evidence = Evidence(**known | {"machine": machine} | facts)
        return with_auto(evidence, requested, 4.0, None, SILENT), trials

    return measure


@pytest.mark.parametrize(
    ("asked", "facts", "wanted"),
    [
        ({}, {}, ""),
        ({"speedups": "auto,-compile"}, {}, ""),  # auto would not compile either
        ({"batch__rows_per_device": 1}, {}, MANY),
        ({"batch__rows_per_device": 4}, {}, MANY),
        ({"speedups": "auto,+checkpointing"}, {}, "speedups=auto"),
        ({"speedups": "none", "batch__rows_per_device": 2}, {}, f"{MANY} speedups=auto"),
        ({"batch__rows_per_device": 1}, {"device": "cuda"}, ""),
        ({"batch__rows_per_device": 1}, {"step_s": 3.0}, ""),
        (
            {"batch__rows_per_device": 1},
            {"step_s": None, "failure": Failure(kind="error", message="Oh.")},
            "",
        ),
    ],
)
def test_only_what_the_recipe_does_not_leave_to_auto_is_tried(tried, asked, facts, wanted):
    found, trials = tried(asked, **facts)
    assert trials == (["", wanted, wanted, ""] if wanted else [])
    assert {*found.counterfactual_s} == {*filter(None, [wanted])}


def test_the_smaller_gain_of_what_auto_would_choose_is_a_finding(tried):
    asked = {"batch__rows_per_device": 2}
    found, _ = tried(asked, rates=[900, 3000, 2000, 1000], checkpoint_s=0.02, evaluation_s=0.02)
    assert found.counterfactual_s[MANY] == pytest.approx(0.03 + 0.04), "saves take as long"
    (finding,) = (one for one in diagnosis_of(found).findings if one.name == "slow-settings")
    assert finding.verdict == f"With {MANY}, a step takes 30% less."
    (fix,) = finding.fixes
    assert fix.overrides == {"batch.rows_per_device": 8, "batch.accumulate": 1}
    for rates in ([1000, 1050, 1050, 1000], [1000, 1200, None, 1000]):
        found, _ = tried(asked, rates=rates)
        assert "slow-settings" not in {one.name for one in diagnosis_of(found).findings}


@pytest.mark.thorough
def test_small_micro_batches_are_found_by_trials_of_a_real_recipe(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    small = {"batch.rows_per_device": 1, "batch.tokens_per_step": 16 * 16}
    config = tiny_config().with_values(small)
    evidence = diagnose_recipe(config, seconds=1.0)
    (name,) = (one for one in evidence.counterfactual_s if "=" in one)
    assert name == "batch.rows_per_device=16 batch.accumulate=1"
    findings = {one.name: one for one in diagnosis_of(evidence).findings}
    assert findings["slow-settings"].fixes[0].overrides["batch.rows_per_device"] == 16
    assert list(tmp_path.iterdir()) == []
