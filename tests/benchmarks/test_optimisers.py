"""Both optimisers are tuned alike, and the share of tokens is computed from the runs."""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from flatout import Dataset

SETTINGS = {"adamw": {"kind": "adamw", "lr": 0.004}, "muon": {"kind": "muon", "lr": 0.008}}


def bowl(best_rate, seen):
    """Return a fake trial with its lowest loss at `best_rate`; the largest rates diverge.

    The loss is lower without decay, with a larger beta2 and with a smaller momentum.
    """

    def trial(setting, fraction, seed):
        loss = (
            math.log2(setting.lr / best_rate) ** 2
            + setting.weight_decay
            - setting.beta2
            + setting.momentum
        )
        seen.append(
            {
                **asdict(setting),
                "fraction": fraction,
                "seed": seed,
                "val_loss": None if setting.lr > 0.2 else loss,
            }
        )
        return seen[-1]

    return trial


@pytest.mark.parametrize("best_rate", [0.0005, 0.004, 0.064])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_grid_grows_until_the_best_value_is_inside(benchmark, kind, best_rate):
    seen = []
    found = benchmark.tuned(kind, bowl(best_rate, seen))
    assert found == benchmark.Setting(
        kind, best_rate, 0.0, **{"adamw": {"beta2": 0.99}, "muon": {"momentum": 0.9}}[kind]
    )
    assert set(benchmark.RATES) <= {row["lr"] for row in seen}
    assert min(row["lr"] for row in seen) < best_rate < max(row["lr"] for row in seen)
    assert {(row["fraction"], row["seed"]) for row in seen} == {
        (benchmark.TUNED_AT[kind], benchmark.TUNING_SEED)
    }
    assert benchmark.TUNING_SEED not in benchmark.SEEDS


def test_runs_differ_only_in_the_tuned_values(benchmark, tiny_set):
    dataset = Dataset.open(tiny_set)
    corpus = benchmark.CORPORA[0]
    adamw, muon = (
        benchmark.configured(corpus, dataset, benchmark.Setting(kind, 0.002, 0.1), 0.5, 1).to_dict()
        for kind in ("adamw", "muon")
    )
    assert adamw.pop("optim") | {"kind": "muon"} == muon.pop("optim")
    assert adamw == muon
    assert adamw["train"]["steps"] * 2048 == corpus.tokens / 2


@pytest.mark.slow
def test_a_finished_run_is_not_repeated_with_the_same_code(
    benchmark, load, monkeypatch, tiny_set, tmp_path
):
    runs = load("training_runs")
    monkeypatch.setattr(runs, "code_state", lambda: "1a2b3c4")
    dataset, cache = Dataset.open(tiny_set), tmp_path / "runs.jsonl"
    tiny = {"model.num_layers": 1, "model.d_model": 16, "model.num_heads": 2, "data.seq_len": 16}
    corpus = benchmark.Corpus("tiny", "made-up sentences", "byte", 2048 * 2, 128, tiny)
    setting = benchmark.Setting("muon", 0.004, 0.1)
    first = benchmark.fitted(corpus, dataset, setting, 1.0, 1, cache)
    assert first["tokens"] == 4096
    assert 4 < first["val_loss"] < 6
    monkeypatch.setattr(benchmark, "built", lambda *_: pytest.fail("the run was repeated"))
    assert benchmark.fitted(corpus, dataset, setting, 1.0, 1, cache) == first
    monkeypatch.setattr(runs, "code_state", lambda: "1a2b3c4+5d6e7f80")
    with pytest.raises(pytest.fail.Exception, match="the run was repeated"):
        benchmark.fitted(corpus, dataset, setting, 1.0, 1, cache)


@pytest.mark.skipif(shutil.which("git") is None, reason="takes git")
def test_the_state_of_the_code_is_a_commit_and_later_changes(benchmark, tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    def state():
        return benchmark.code_state.__wrapped__(tmp_path)

    package = tmp_path / "flatout"
    package.mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "optimisers.py").write_text("")
    (package / "a.py").write_text("a = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = state()
    (tmp_path / "README.md").write_text("words\n")
    git("add", ".")
    git("commit", "-m", "words")
    assert state() == clean
    (package / "a.py").write_text("a = 2\n")
    changed = state()
    (package / "b.py").write_text("b = 1\n")
    assert len({clean, changed, state()}) == 3
    assert changed.startswith(f"{clean}+")
    git("add", ".")
    git("commit", "-m", "second")
    assert "+" not in state()
    assert state() != clean


def row(kind, lr, fraction, seed, loss):
    return {"kind": kind, "lr": lr, "fraction": fraction, "seed": seed, "val_loss": loss}


def falling(first, *, adamw=2.0):
    """Return runs in which Muon's loss falls by 0.4 per doubling and AdamW ends at `adamw`.

    They include a tuning run, which must not be counted.
    """
    rows = [row("adamw", 0.004, 1.0, 7, 1.0), row("muon", 0.016, 0.5, 1, 1.0)]
    for n, seed in enumerate((1, 2, 3)):
        rows += [
            row("muon", 0.008, 0.25 * 2**k, seed, first + 0.01 * n - 0.4 * k) for k in range(3)
        ]
        rows += [
            row("adamw", 0.004, fraction, seed, adamw + (1 - fraction) + 0.01 * n)
            for fraction in (0.5, 1.0)
        ]
    return rows


def test_the_fraction_is_interpolated_per_seed(benchmark):
    found = benchmark.summary(falling(2.2), SETTINGS, (1, 2, 3))
    assert found["needed_by_seed"] == pytest.approx([0.25 * math.sqrt(2)] * 3)
    assert found["interval_95"] == pytest.approx((found["needed"], found["needed"]))
    assert [point["fraction"] for point in found["curves"]["adamw"]] == [0.5, 1.0]


def test_a_loss_outside_all_runs_has_no_fraction(benchmark):
    assert benchmark.summary(falling(1.9), SETTINGS, (1, 2, 3))["needed"] is None
    assert benchmark.summary(falling(2.9), SETTINGS, (1, 2, 3))["needed"] is None
    assert benchmark.crossing([(0.5, 2.0), (1.0, 2.0)], 2.0) == 0.5


def test_the_interval_uses_students_distribution(benchmark):
    low, _, high = benchmark.mean_of([0.4, 0.5, 0.6])
    assert (low + high) / 2 == pytest.approx(0.5)
    assert (high - low) / 2 == pytest.approx(4.303 * 0.1 / math.sqrt(3))


def test_the_picture_has_a_point_for_every_seed(benchmark):
    corpus = {
        "title": "a text",
        "tokens": 1_000_000,
        **benchmark.summary(falling(2.2), SETTINGS, (1, 2, 3)),
    }
    drawn = ElementTree.fromstring(benchmark.picture({"corpora": [corpus, corpus]}))
    assert len([element for element in drawn.iter() if element.tag.endswith("circle")]) == 2 * (
        9 + 6
    )
