"""What tune writes about a search."""

from __future__ import annotations

import pytest

from flatout.measure.experiments.bench import gains_of
from flatout.measure.experiments.records import Best, Choice, Figure, Left
from flatout.measure.experiments.report import NO_TIME, Tuning

GAIN = Figure(median=1.25, low=1.2, high=1.3)


def choice(name="+ compile", **changes):
    is_left_out = name.startswith("-")
    facts = {
        "kind": "leave-one-out" if is_left_out else "add-one",
        "speedup": name.split()[1],
        "leaves_out": is_left_out,
        "verdict": "x1.25",
        "gain": GAIN,
        "within_tolerance": True,
        "taken": False,
        "status": "ok",
    }
    return Choice(name=name, part="speedups", against="auto", repeats=3, **facts | changes)


def tuning(*choices, **changes):
    best = Best(
        name="+ compile",
        kind="best",
        rows_per_device=4,
        accumulate=2,
        prefetch=4,
        precision="fp32",
        speedups=["compile"],
        tokens_per_s=Figure(median=1250.0, low=1200.0, high=1300.0),
        gain=GAIN,
        verdict="x1.25",
        peak_gib=0.5,
        rehearsed=["evaluation", "save"],
    )
    facts = {
        "wall_s": 90.0,
        "began": "2026-11-22T10:00:00+00:00",
        "environment": {"torch": "2.13.0+cpu"},
        "commit": "abc1234",
        "best": best,
    }
    about = {"path": "tuned.yaml", "recipe": "mine", "machine": "a CPU", "start": "auto"}
    facts |= {**about, "tokens_per_step": 128, "choices": list(choices), "trials": []}
    return Tuning(**facts | changes)


def test_the_header_states_what_was_taken_and_what_was_not():
    failed = choice("+ fp8", gain=None, status="failed", verdict="failed: It broke.")
    slower = Figure(median=0.8, low=0.78, high=0.82)
    lines = tuning(
        choice(taken=True), failed, choice("- prefetch", gain=slower, verdict="slower, x0.80")
    ).lines()
    text = "\n".join(lines)
    assert "1,250 tokens/s; gain over auto: x1.25 (1.20 to 1.30); peak 0.50 GiB." in text
    assert "Rehearsed with it: evaluation and save." in text
    assert lines.index("  + compile  x1.25 (1.20 to 1.30)") < lines.index("Measured and not taken:")
    assert "  - prefetch  slower, x0.80 (0.78 to 0.82)" in lines
    assert "  + fp8       failed: It broke." in lines


def test_the_header_counts_what_there_was_no_time_for():
    late = [Left(name=name, reason=NO_TIME) for name in ("+ fp8", "+ compile")]
    lines = tuning(choice(), not_tried=[*late, Left(name="x", reason="No.")]).lines()
    assert lines[-1] == "There was not enough time for 2 others. Add --minutes."
    best = tuning().best.model_copy(update={"name": "auto", "gain": None})
    assert "nothing else was measured" in tuning(best=best).lines()[1]
    assert "nothing that was measured is faster" in tuning(choice(), best=best).lines()[1]


def test_a_change_is_listed_once_and_long_lines_wrap():
    verdict = "failed: " + "very " * 40 + "long."
    lines = tuning(choice(gain=None, verdict=verdict)).lines()
    assert verdict in " ".join(" ".join(lines).split())
    assert lines[-1].startswith(" " * 13 + "very")
    assert max(map(len, lines)) <= 120
    first, second = choice(verdict="first", gain=None), choice(verdict="second", gain=None)
    assert tuning(first, second).lines()[-1] == "  + compile  second"
    assert "Measured and not taken:" not in tuning(first, choice(taken=True)).lines()


def test_only_sure_gains_of_single_speedups_are_kept():
    unsure = Figure(median=1.5, low=None, high=None)
    found = gains_of(
        tuning(
            choice("+ compile"),
            choice("- prefetch", gain=Figure(median=0.8, low=0.5, high=0.9)),
            choice("+ fp8", within_tolerance=False),
            choice("+ bf16", gain=unsure),
            choice("+ checkpointing, batch.rows_per_device=8", speedup=None),
            choice("+ fp16", gain=None),
        )
    )
    assert set(found) == {"compile", "prefetch"}
    assert (found["compile"].gain, found["compile"].low) == (1.25, 1.2)
    assert (found["prefetch"].gain, found["prefetch"].high) == (1.25, 2.0)
    assert found["prefetch"].low == pytest.approx(1 / 0.9)
    assert found["compile"].torch == "2.13.0+cpu"
