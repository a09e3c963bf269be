"""A diagnosis: its order, its verdict, and its text."""

from __future__ import annotations

import json

import pytest

from flatout.display import terminal_text
from flatout.measure.diagnose import diagnosis
from flatout.measure.diagnose.diagnosis import diagnosis_of, next_for_recipe
from flatout.measure.evidence import CallSite, Evidence
from flatout.measure.rules import row

SITE = CallSite(
    file="mine.py", line=7, text="slow()", caller=CallSite(file="a", line=1, text="f()")
)
STEPS = Evidence(
    source="measured run",
    step_s=0.1,
    compute_s=0.08,
    optimizer_s=0.01,
    data_wait_s=0.001,
    mfu=0.41,
    peak_tflops=0.2,
    peak_source="measured here",
    sites={"own": (SITE,)},
)

BUSY = {"device": "cpu", "other_busy_cores": 2.0, "cores": 2, "threads": 2}


@pytest.fixture
def names(monkeypatch):
    """Return the order of the findings of rules: (name, loss), or (name, loss, more)."""

    def order(given, **facts):
        rules = [
            row(name, "-", lambda e, loss=loss: loss, f"{name} it is.", "Mend it.", **dict(*more))
            for name, loss, *more in given
        ]
        monkeypatch.setattr(diagnosis, "rules", lambda: rules)
        found = diagnosis_of(STEPS.model_copy(update=facts))
        assert not found.findings or found.verdict == found.findings[0].verdict
        return " ".join(one.name for one in found.findings)

    return order


@pytest.mark.parametrize(
    ("given", "facts", "order"),
    [
        ([("a", 0.2), ("b", 0.4), ("c", "warns"), ("d", "fails")], {}, "d b a c"),
        ([("a", 0.9), ("busy-machine", 0.2), ("x", "spoils")], {}, "x a busy-machine"),
        ([("a", 0.9), ("b", "slows")], {}, "b a"),  # its time was not measured
        # a clear line of a script comes before a busy machine
        ([("busy-machine", 0.5), ("a", 0.2, {"site": "own"})], {}, "busy-machine a"),
        (
            [("busy-machine", 0.5), ("a", 0.2, {"site": "own"})],
            {"source": "script"},
            "a busy-machine",
        ),
        # a specific cause silences the general one
        ([("idle", 0.9, {"unless": "x sync"}), ("sync", 0.5)], {}, "sync"),
        ([("idle", 0.9, {"unless": "x sync"}), ("sync", None)], {}, "idle"),
    ],
)
def test_the_worst_finding_gives_the_verdict(names, given, facts, order):
    assert names(given, **facts) == order


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"other_busy_cores": 0.1}, "Nothing holds this run back."),
        ({}, "Nothing was found. Other use of the machine was not measured."),
        ({"compute_s": 0.03}, "Nothing was found, but only 40% of each step is computation."),
        ({"step_s": None}, "Nothing keeps this run from starting."),
        (
            {"step_s": None, "machine_lines": (("CPU", "one"),)},
            "Nothing on this machine slows training down.",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_healthy_verdict_says_what_was_measured(facts, verdict, device):
    if device == "cuda" and "other_busy_cores" in facts:
        facts = {"gpu_others": 0}
    known = {"sites": {}, "device": device} | facts
    assert diagnosis_of(STEPS.model_copy(update=known)).verdict == verdict


def test_its_json_is_strict_with_a_format_version():
    text = diagnosis_of(STEPS.model_copy(update={"data_wait_s": 0.02})).model_dump_json()
    stored = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert stored["format_version"] == 4
    assert stored["verdict"] == "20% of each step waits for data."
    assert stored["roofline"]["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("overrides", "facts", "command"),
    [
        (["optim.lr=1"], {"data_wait_s": 0.02}, "`flatout train R optim.lr=1 speedups=prefetch`"),
        ([], {"data_wait_s": 0.0}, "`flatout tune R`"),
        # the first finding, a busy machine, has no setting
        ([], {"data_wait_s": 0.02} | BUSY, "`flatout train R speedups=prefetch`"),
        (["log.every=1"], {"logging_s": 0.05}, "`flatout train R log.every=10`"),
        ([], {"disk_needed_gib": 2.0, "disk_free_gib": 1.0}, "keep=1 checkpoint.keep_every=null`"),
    ],
)
def test_the_next_command_trains_with_the_fix_or_measures(tiny_config, overrides, facts, command):
    config = tiny_config(speedups="none", log__every=1 if overrides == ["log.every=1"] else 10)
    known = facts | {"config": config, "speedups": ("pretokenised",)}
    found = diagnosis_of(STEPS.model_copy(update=known))
    assert next_for_recipe(found, config, "R", overrides).endswith(command)


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
def test_a_fix_edits_the_speedups(speedups, edit, expected):
    assert diagnosis.edited(speedups, edit) == expected


def test_what_a_busy_machine_cannot_explain_comes_before_it():
    busy = STEPS.model_copy(update=BUSY | {"other_busy_cores": 1.1, "evaluation_s": 0.08})
    names = [finding.name for finding in diagnosis_of(busy).findings]
    assert names == ["frequent-evaluation", "busy-machine"]
    less = busy.model_copy(update={"evaluation_s": 0.04})
    assert diagnosis_of(less).findings[0].name == "busy-machine"


def test_the_text_shows_the_step_the_findings_and_the_rate_with_and_without_saves():
    evidence = Evidence(
        source="measured run",
        step_s=0.2,
        compute_s=0.1,
        evaluation_s=0.03,
        checkpoint_s=0.02,
        host_s=0.01,
        gc_s=0.0002,
        data_wait_s=0.04,
        tokens_per_s=1000.0,
        peak_tflops=0.2,
        peak_source="measured here",
        mfu=0.5,
        steps=1,
        planned_steps=18_000,
        train_tokens=1_000_000,
        epochs=2.5,
        sites={"worker": (SITE,), "own": (SITE.model_copy(update={"seconds_per_step": 0.03}),)},
        workers=2,
        cores=2,
        notes=("Oh.",),
    )
    found = diagnosis_of(evidence).model_copy(update={"next": "`flatout tune my.yaml`"})
    assert found.summary() == (
        "20% of each step waits for data.\n"
        "Step      200 ms, on average of 1 step: 50% compute, 20% data wait, 15% evaluation, "
        "10% saving, 5% host\n"
        "Dataset   1,000,000 tokens, read 2.5 times\n"
        "Training  about 1 h 00 min for 18,000 steps\n"
        "Rate      1,000 tokens/s, 750 with saves and evaluations\n"
        "Peak      50.0% of 0.2 TFLOP/s (measured here)\n\n"
        "1. slow-data\n"
        "at        mine.py:7: slow() (called at a:1: f())\n"
        "evidence  data wait 40 ms\n"
        "fix       Do the work of mine.py:7 once, before training.\n\n"
        "2. slow-code: 15% of each step goes into lines that are no work of forward, backward or "
        "optimizer, most of it into mine.py:7: slow() (called at a:1: f()).\n"
        "fix  Take it out of the step, do it every few steps, or compute it for whole tensors "
        "at once.\n\n"
        "3. slow-save: Saving checkpoints takes 10% of the run.\n"
        "fix  Save less often, or to a faster disk, or on a GPU in a background thread.\n\n"
        "Note: Oh.\n"
        "Next: `flatout tune my.yaml`"
    )
    assert max(map(len, terminal_text(found.display(), 60).splitlines())) <= 60
