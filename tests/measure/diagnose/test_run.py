"""A measured run with planted faults: the right one is named, with its line and its numbers."""

from __future__ import annotations

import gc
import time
from functools import partial

import pytest
import torch
from own_time import OwnTime, compute

from flatout.assembly import run as assembling
from flatout.measure.diagnose import run as diagnose_run
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.preflight import failure_of, prepare
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.steps import trace
from flatout.measure.steps import windows as shared
from flatout.models import transformer
from flatout.training.metrics import clocks
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


@pytest.fixture
def own_time(monkeypatch):
    """Measure what this thread computes, so that a busy machine causes no finding."""
    timer = partial(PhaseTimer, clock=OwnTime.perf_counter)
    monkeypatch.setattr(clocks, "PhaseTimer", timer)
    monkeypatch.setattr(diagnose_run, "time", OwnTime)
    monkeypatch.setattr(shared, "time", OwnTime)


@pytest.fixture
def measured(tiny_config, tmp_path, monkeypatch, own_time):
    """Return the names of the findings, and the evidence, of a run in this process.

    Objects of earlier tests are hidden from the collector, which they would slow down.
    """
    monkeypatch.setattr(diagnose_run.os, "_exit", lambda code: None)
    gc.collect()
    gc.freeze()

    def measure(**changes):
        config = tiny_config().with_values(
            SIZE | {key.replace("__", "."): value for key, value in changes.items()}
        )
        spec = MeasureSpec(
            config=config.to_dict(), folder=str(tmp_path / "run"), seconds=0.5, warmup_s=0.5
        )
        found = []
        diagnose_run.collect(spec.model_dump_json(), found.append)
        evidence = found[-1]
        names = {finding.name for finding in diagnosis_of(evidence).findings}
        return names - MACHINE, evidence

    yield measure
    gc.unfreeze()


def test_a_healthy_run_has_no_findings_and_phases_that_fill_the_step(measured):
    names, evidence = measured(batch__tokens_per_step=2048)  # logging: 2% of the step
    assert names == set()
    assert evidence.source == "measured run"
    assert evidence.steps >= 5
    assert 0.7 < sum(evidence.phase_shares().values()) <= 1.01
    assert evidence.phases.compute_s > 0
    assert evidence.phases.optimizer_s > 0
    assert evidence.phases.communication_s is None
    assert evidence.gpu is None
    assert evidence.counts.pageable_copies is None
    assert evidence.roof.tokens_per_s > 0
    assert evidence.counterfactual_s["synthetic-data"] > 0
    assert {share.kind for share in evidence.kernels} >= {"matmul", "elementwise"}
    assert evidence.notes == ()


def test_losses_are_of_the_steps_of_the_recipe_alone(measured):
    """Steps on a fixed batch, and those after its training, say nothing about the recipe."""
    _, evidence = measured(batch__tokens_per_step=2048, train__steps=6)
    assert evidence.losses
    assert max(step for step, _ in evidence.losses + evidence.grad_norms) <= 6
    assert evidence.steps > 6


def test_slow_steps_leave_time_for_the_diagnosis(tiny_config, tmp_path):
    config = tiny_config().with_values(SIZE)
    spec = MeasureSpec(
        config=config.to_dict(), folder=str(tmp_path / "run"), seconds=0.0, warmup_s=0.1, limit_s=0
    )
    evidence = diagnose_run.measured(spec, prepare(spec))
    assert (evidence.steps, evidence.failure, evidence.kernels) == (2, None, None)
    assert evidence.step_s > 0
    assert "only its phases were measured" in evidence.notes[0]


def test_a_slow_source_is_named_with_its_line(measured, monkeypatch):
    plain = assembling.make_feed

    class SlowReader:
        def __init__(self, reader):
            self.reader = reader

        def read(self, *arguments):
            compute()
            self.reader.read(*arguments)

    def slow(*arguments):
        feed = plain(*arguments)
        feed._steps._reader = SlowReader(feed._steps._reader)
        return feed

    monkeypatch.setattr(assembling, "make_feed", slow)
    names, evidence = measured(speedups="auto,-compile,-prefetch")
    assert names == {"slow-data"}
    (finding,) = [f for f in diagnosis_of(evidence).findings if f.name == "slow-data"]
    assert finding.site.text == "compute()"
    assert finding.share > 0.1
    assert finding.fixes[0].gain == finding.share
    assert {"speedups": "+prefetch"} in [fix.overrides for fix in finding.fixes]
    assert evidence.counterfactual_s["synthetic-data"] < evidence.step_s


class Tiny(transformer.MODEL):
    def forward(self, tokens_BT, targets_BT, doc_ids_BT=None):
        loss, num_valid = super().forward(tokens_BT, targets_BT, doc_ids_BT)
        for _ in range(8000):
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
        return super().forward(tokens_BT, targets_BT, doc_ids_BT)


def test_tiny_operations_are_named_with_their_line(measured, monkeypatch):
    monkeypatch.setattr(trace, "TINY_S", 1.0)  # also on a busy machine
    names, evidence = measured(model__kind=f"{__name__}:Tiny")
    assert "tiny-kernels" in names
    assert evidence.counts.tiny_ops == evidence.counts.ops > 8000
    assert evidence.site("op").text == "loss = loss * 1.0"


def test_reads_and_empty_cache_are_named_by_count_on_a_cpu(measured):
    names, evidence = measured(model__kind=f"{__name__}:Reads")
    assert names >= {"host-sync", "empty-cache"}  # tiny kernels too, on a busy machine
    assert evidence.counts.syncs - evidence.counts.expected_syncs == 2
    assert evidence.site("sync").text.startswith("if loss.item() > 1e9")
    assert evidence.site("empty-cache").text == "torch.cuda.empty_cache()"


def test_a_collector_storm_is_named_with_its_call(measured):
    examined = [[] for _ in range(300_000)]  # by every collection
    names, evidence = measured(model__kind=f"{__name__}:Collects")
    assert "garbage-collection" in names
    assert evidence.site("gc").text == "gc.collect()"
    assert evidence.counts.full_collections == pytest.approx(1, abs=0.2)
    assert examined


def test_a_slow_save_is_named(measured, monkeypatch):
    from flatout.training.checkpoint import savers

    plain = savers.Saver.save

    def slow(self, *arguments, **options):
        time.sleep(0.4)
        plain(self, *arguments, **options)

    monkeypatch.setattr(savers.Saver, "save", slow)
    names, evidence = measured(checkpoint__every_steps=2)
    assert "slow-save" in names
    assert evidence.phases.checkpoint_s > 0


def test_frequent_evaluation_is_named(measured, monkeypatch):
    plain = diagnose_run.score
    monkeypatch.setattr(diagnose_run, "score", lambda *a, **k: (compute(), plain(*a, **k))[1])
    names, evidence = measured(train__eval_every=1)
    assert "frequent-evaluation" in names
    (finding,) = [f for f in diagnosis_of(evidence).findings if f.name == "frequent-evaluation"]
    (rarer,) = [fix for fix in finding.fixes if "train.eval_every" in fix.overrides]
    assert 1 < rarer.overrides["train.eval_every"] <= evidence.planned_steps


def test_running_out_of_memory_is_named_with_rows_that_fit(measured):
    names, evidence = measured(model__kind=f"{__name__}:Hungry")
    assert names == {"out-of-memory"}
    assert evidence.failure.kind == "out-of-memory"
    assert evidence.failure.site.text == "torch.empty(2**50)"


def test_divergence_is_named(measured):
    names, evidence = measured(optim__lr=1e30, schedule__warmup=0, optim__clip=0)
    assert names == {"unstable-training"}
    assert evidence.failure.kind == "diverged"


def test_a_missing_package_is_named_with_its_line(measured):
    names, evidence = measured(model__kind=f"{__name__}:Broken")
    assert names == {"missing-package"}
    assert evidence.failure.message == "The package imaginary is not installed."
    assert evidence.failure.site.text.startswith("raise ModuleNotFoundError")


def test_missing_data_is_a_finding(measured, tmp_path):
    names, evidence = measured(data__path=str(tmp_path / "absent"))
    assert names == {"no-data"}
    assert evidence.step_s is None


def test_a_hanging_run_is_named_with_its_line(tiny_config, tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(diagnose_run.os, "_exit", left.append)
    monkeypatch.setattr(diagnose_run, "measured", lambda *_: time.sleep(1.0))
    found = []
    spec = MeasureSpec(config=tiny_config().to_dict(), folder=str(tmp_path), limit_s=0.3)
    diagnose_run.collect(spec.model_dump_json(), found.append)
    assert left == [0]
    (finding,) = [f for f in diagnosis_of(found[1]).findings if f.name == "hang"]
    assert finding.harm == "fails"
    assert finding.site.text.startswith("monkeypatch.setattr(diagnose_run, ")


def test_a_compiler_that_fails_is_named(measured, monkeypatch):
    from flatout.training import warmup

    def fails(*_):
        return RuntimeError("no compiler"), True

    answers = iter([fails, lambda *_: (None, False)])
    monkeypatch.setattr(warmup, "_try_step", lambda *given: next(answers)(*given))
    names, evidence = measured(speedups="auto,+compile")
    assert "compile-failure" in names
    assert "no compiler" in evidence.compile_fallback


def test_the_specified_warmup_is_kept_in_the_longer_run(tiny_config, tmp_path):
    spec = MeasureSpec(
        config=tiny_config(schedule__warmup=0.5, train__steps=40).to_dict(), folder=str(tmp_path)
    )
    prepared = prepare(spec)
    assert prepared.warmup_steps == 20
    assert prepared.evidence.planned_steps == 40
    assert prepared.evidence.memory.estimated_gib > 0
    assert prepared.evidence.data.train_tokens > 0


def test_errors_of_flatout_keep_their_fix():
    from flatout.errors import ConfigError

    found = failure_of(ConfigError("It is wrong.", fix="Correct it."), 3)
    assert (found.kind, found.message, found.fix, found.step) == (
        "error",
        "It is wrong.",
        "Correct it.",
        3,
    )


def test_a_slow_callback_is_named_with_its_line(tiny_config, tmp_path, own_time):
    from flatout.measure.diagnose.diagnose import diagnose_recipe
    from flatout.training.metrics.observers import Quiet

    class Slow(Quiet):
        def on_tick(self, step, last_step):
            compute()

    config = tiny_config(checkpoint__dir=str(tmp_path)).with_values(SIZE)
    found = diagnose_recipe(config, seconds=0.3, callbacks=[Slow()])
    (finding,) = [one for one in diagnosis_of(found).findings if one.name not in MACHINE]
    assert finding.name == "slow-logging"
    assert finding.site.text == "compute()"
