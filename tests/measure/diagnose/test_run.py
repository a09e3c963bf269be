"""A measured run with planted faults: the right one is named, with its line and its numbers."""

from __future__ import annotations

import gc
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from own_time import OwnTime, compute

from flatout.assembly import run as assembling
from flatout.errors import ConfigError
from flatout.measure.diagnose import run as diagnose_run
from flatout.measure.diagnose.diagnose import diagnose_recipe
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.preflight import failure_of, prepare
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.steps import trace
from flatout.measure.steps import windows as shared
from flatout.models import transformer
from flatout.training import warmup
from flatout.training.checkpoint import savers
from flatout.training.metrics import clocks
from flatout.training.metrics.observers import Quiet
from flatout.training.metrics.phases import PhaseTimer

pytestmark = pytest.mark.slow

MACHINE = {"busy-machine", "cpu-threads"}
"""Findings about the machine on which the tests run."""
SIZE = {
    "model.d_model": 96,
    "model.num_heads": 2,
    "data.seq_len": 64,
    "batch.tokens_per_step": 1024,
    "batch.rows_per_device": 16,
}
"""Large enough that operations are not tiny."""
QUICK = {"seconds": 1.0, "warmup_s": 0.5}


@pytest.fixture
def own_time(monkeypatch):
    """Measure what this thread computes, so that a busy machine causes no finding."""
    timer = partial(PhaseTimer, clock=OwnTime.perf_counter)
    monkeypatch.setattr(clocks, "PhaseTimer", timer)
    monkeypatch.setattr(diagnose_run, "time", OwnTime)
    monkeypatch.setattr(shared, "time", OwnTime)


@pytest.fixture
def measured(tiny_config, tmp_path, monkeypatch, own_time):
    """Return the findings by name, and the evidence, of a run in this process.

    Objects of earlier tests are hidden from the collector, which they would slow down.
    """
    monkeypatch.setattr(diagnose_run.os, "_exit", lambda code: None)
    gc.collect()
    gc.freeze()

    def measure(**changes):
        values = {key.replace("__", "."): value for key, value in changes.items()}
        config = tiny_config().with_values(SIZE | values)
        spec = MeasureSpec(config=config.to_dict(), folder=str(tmp_path / "run"), **QUICK)
        found = []
        diagnose_run.collect(spec.model_dump_json(), found.append)
        findings = {one.name: one for one in diagnosis_of(found[-1]).findings}
        return {name: findings[name] for name in findings.keys() - MACHINE}, found[-1]

    yield measure
    gc.unfreeze()


def test_a_healthy_run_has_no_findings_and_phases_that_fill_the_step(measured):
    found, evidence = measured(batch__tokens_per_step=2048)  # logging: 2% of the step
    assert found == {}
    assert evidence.source == "measured run"
    assert evidence.steps > 6
    assert evidence.losses
    steps = {step for step, _ in evidence.losses + evidence.grad_norms}
    assert max(steps) <= 6, "later steps, and those on a fixed batch, tell nothing about the recipe"
    assert 0.7 < sum(evidence.phase_shares().values()) <= 1.01
    assert evidence.compute_s > 0
    assert evidence.optimizer_s > 0
    assert evidence.communication_s is evidence.pageable_copies is evidence.clock_share is None
    assert evidence.tokens_per_s > 0
    assert evidence.counterfactual_s["synthetic-data"] > 0
    assert {share.kind for share in evidence.kernels} >= {"matmul", "elementwise"}
    assert evidence.notes == ()


def test_slow_steps_leave_time_for_the_diagnosis(tiny_config, tmp_path):
    limits = {"seconds": 0.0, "warmup_s": 0.1, "limit_s": 0}
    config = tiny_config().with_values(SIZE).to_dict()
    spec = MeasureSpec(config=config, folder=str(tmp_path / "run"), **limits)
    evidence = diagnose_run.measured(spec, prepare(spec))
    assert (evidence.steps, evidence.failure, evidence.kernels) == (2, None, None)
    assert evidence.step_s > 0
    assert "only its phases were measured" in evidence.notes[0]


def test_a_slow_source_is_named_with_its_line(measured, monkeypatch):
    def slow(*arguments):
        loader = plain(*arguments)
        reader = loader._steps._reader
        loader._steps._reader = SimpleNamespace(
            read=lambda *given: (compute(), reader.read(*given))
        )
        return loader

    plain = assembling.make_loader
    monkeypatch.setattr(assembling, "make_loader", slow)
    found, evidence = measured(speedups="auto,-compile,-prefetch")
    assert found.keys() == {"slow-data"}
    finding = found["slow-data"]
    assert "compute()" in finding.site.text
    assert finding.share > 0.1
    assert {"speedups": "+prefetch"} in [fix.overrides for fix in finding.fixes]
    assert evidence.counterfactual_s["synthetic-data"] < evidence.step_s


class Tiny(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        loss, num_valid = super().forward(tokens_BT, targets_BT, doc_ids_BT)
        for _ in range(2000):
            loss = loss * 1.0
        return loss, num_valid


class Reads(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        loss, num_valid = super().forward(tokens_BT, targets_BT, doc_ids_BT)
        if loss.item() > 1e9 or float(num_valid) < 0:
            raise ValueError
        torch.cuda.empty_cache()
        return loss, num_valid


class Collects(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        gc.collect()
        return super().forward(tokens_BT, targets_BT, doc_ids_BT)


class Broken(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        raise ModuleNotFoundError("No module named 'imaginary'", name="imaginary")


class Hungry(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        torch.empty(2**50)


def test_tiny_operations_are_named_with_their_line(measured, monkeypatch):
    monkeypatch.setattr(trace, "TINY_S", 1.0)  # also on a busy machine
    found, evidence = measured(model__kind=f"{__name__}:Tiny")
    assert "tiny-kernels" in found
    assert evidence.tiny_ops == evidence.ops > 2000
    assert evidence.site("op").text == "loss = loss * 1.0"


def test_reads_and_empty_cache_are_named_by_count_on_a_cpu(measured):
    found, evidence = measured(model__kind=f"{__name__}:Reads")
    assert found.keys() >= {"host-sync", "empty-cache"}  # tiny kernels too, on a busy machine
    assert evidence.syncs - evidence.expected_syncs == 2
    assert evidence.site("sync").text.startswith("if loss.item() > 1e9")
    assert evidence.site("empty-cache").text == "torch.cuda.empty_cache()"


def test_a_collector_storm_is_named_with_its_call(measured):
    examined = [[] for _ in range(300_000)]  # by every collection
    found, evidence = measured(model__kind=f"{__name__}:Collects")
    assert "garbage-collection" in found
    assert evidence.site("gc").text == "gc.collect()"
    assert evidence.collections >= 0.8
    assert examined


def test_a_slow_save_is_named(measured, monkeypatch):
    plain = savers.Saver.save
    monkeypatch.setattr(savers.Saver, "save", lambda *a, **k: (time.sleep(0.4), plain(*a, **k)))
    found, evidence = measured(checkpoint__every_steps=2)
    assert "slow-save" in found
    assert evidence.checkpoint_s > 0


def test_frequent_evaluation_is_named(measured, monkeypatch):
    plain = diagnose_run.score
    monkeypatch.setattr(diagnose_run, "score", lambda *a, **k: (compute(), plain(*a, **k))[1])
    found, evidence = measured(train__eval_every=1)
    fixes = [fix.overrides for fix in found["frequent-evaluation"].fixes]
    (rarer,) = [values for values in fixes if "train.eval_every" in values]
    assert 1 < rarer["train.eval_every"] <= evidence.planned_steps


@pytest.mark.parametrize(
    ("name", "kind", "line", "changes"),
    [
        ("out-of-memory", "out-of-memory", "torch.empty(2**50)", {"model__kind": "Hungry"}),
        ("failure", "missing-package", "raise ModuleNotFound", {"model__kind": "Broken"}),
        ("unstable-training", "diverged", None, {"optim__lr": 1e30, "schedule__warmup": 0}),
        ("failure", "no-data", None, {"data__path": "absent"}),
    ],
)
def test_a_run_that_fails_shows_why_and_where(measured, name, kind, line, changes):
    if "model__kind" in changes:
        changes = {"model__kind": f"{__name__}:{changes['model__kind']}"}
    found, evidence = measured(optim__clip=0, **changes)
    assert found.keys() == {name}
    failure = evidence.failure
    assert failure.kind == kind
    assert line is None or failure.site.text.startswith(line)
    assert kind != "missing-package" or "package imaginary is not installed" in failure.message


def test_a_hanging_run_is_named_with_its_line(tiny_config, tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(diagnose_run.os, "_exit", left.append)
    monkeypatch.setattr(diagnose_run, "measured", lambda *_: time.sleep(1.0))
    found = []
    spec = MeasureSpec(config=tiny_config().to_dict(), folder=str(tmp_path), limit_s=0.3)
    diagnose_run.collect(spec.model_dump_json(), found.append)
    assert left == [0]
    (finding,) = [f for f in diagnosis_of(found[1]).findings if f.name == "failure"]
    assert finding.harm == "fails"
    assert finding.site.text.startswith("monkeypatch.setattr(diagnose_run, ")


def test_a_compiler_that_fails_is_named(measured, monkeypatch):
    answers = Mock(side_effect=[(RuntimeError("no compiler"), True), *[(None, False)] * 9])
    monkeypatch.setattr(warmup, "_try_step", answers)
    found, evidence = measured(speedups="auto,+compile")
    assert "compile-failure" in found
    assert "no compiler" in evidence.compile_fallback


def test_the_first_evaluation_opens_the_data_and_does_not_count(measured, monkeypatch):
    plain, calls, first_s = diagnose_run.score, [], [0.0]

    def score(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            first_s[0] = OwnTime.perf_counter()
            [compute() for _ in range(10)]
            first_s[0] = OwnTime.perf_counter() - first_s[0]
        return plain(*args, **options)

    monkeypatch.setattr(diagnose_run, "score", score)
    found, evidence = measured(train__eval_every=200)
    assert len(calls) > 1
    assert evidence.evaluation_s < first_s[0] / 200
    assert "frequent-evaluation" not in found


def test_the_specified_warmup_is_kept_in_the_longer_run(tiny_config, tmp_path):
    config = tiny_config(schedule__warmup=0.5, train__steps=40).to_dict()
    prepared = prepare(MeasureSpec(config=config, folder=str(tmp_path)))
    assert prepared.warmup_steps == 20
    assert prepared.evidence.planned_steps == 40
    assert prepared.evidence.estimated_gib > 0
    assert prepared.evidence.train_tokens > 0


def test_errors_of_flatout_keep_their_fix():
    found = failure_of(ConfigError("It is wrong.", fix="Correct it."), 3)
    told = (found.kind, found.message, found.fix, found.step)
    assert told == ("error", "It is wrong.", "Correct it.", 3)


def test_a_slow_callback_is_named_with_its_line(tiny_config, tmp_path, own_time):
    class Slow(Quiet):
        def on_tick(self, step, last_step):
            compute()

    config = tiny_config(checkpoint__dir=str(tmp_path)).with_values(SIZE)
    found = diagnose_recipe(config, seconds=0.3, callbacks=[Slow()])
    (finding,) = [one for one in diagnosis_of(found).findings if one.name not in MACHINE]
    assert finding.name == "slow-logging"
    assert finding.site.text == "compute()"
    assert not any("=" in name for name in found.counterfactual_s), "auto chose all else"
