"""Both models have one size and are tuned alike, and an interrupted measurement resumes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from flatout import Dataset
from flatout.config.registry import MODELS

CHARACTERS = 65


@pytest.fixture
def benchmark(benchmark, load, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    for module in (benchmark, load("training_runs")):
        monkeypatch.setattr(module, "code_state", lambda: "1a2b3c4")
    return benchmark


@pytest.fixture
def toy(benchmark, monkeypatch):
    small = {"model.num_layers": 1, "model.d_model": 16, "speedups": "auto,-compile"}
    monkeypatch.setattr(benchmark, "SHARED", benchmark.SHARED | small)
    for name, value in {"TOKENS_PER_STEP": 64, "SPEED_TOKENS": 64, "TIMED_S": 0.0}.items():
        monkeypatch.setattr(benchmark, name, value)
    return benchmark


def bowl(trial):
    """Return the result of a fake run, with its lowest loss at one learning rate per model.

    The loss rises with the seed and, for the eigenstate network, falls with the length.
    """
    best = {"transformer": 0.004, "eigenstate": 0.064}[trial.model]
    loss = (
        abs(math.log2(trial.lr / best))
        + 0.01 * (trial.seed % 10)
        + (1 / trial.seq_len if trial.model == "eigenstate" else 0)
    )
    return {"parameters": 100, "val_loss": None if trial.lr > 1 else loss, "train_loss": loss}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(("model", "best"), [("transformer", 0.004), ("eigenstate", 0.064)])
def test_the_best_rate_lies_inside_the_grid(benchmark, model, best, optimizer):
    seen = []
    assert (
        benchmark.tuned(model, optimizer, lambda trial: seen.append(trial) or bowl(trial)) == best
    )
    assert min(trial.lr for trial in seen) < best < max(trial.lr for trial in seen)
    assert {(trial.model, trial.optimizer, trial.seq_len, trial.seed) for trial in seen} == {
        (model, optimizer, 1024, 1000)
    }


def test_the_models_have_one_size_and_only_the_model_differs(benchmark, tiny_set):
    dataset = Dataset.open(tiny_set)
    trial = benchmark.Trial("transformer", "muon", 0.004, 1024, 1)
    configs = {
        model: benchmark.configured(replace(trial, model=model), dataset)
        for model in benchmark.SHAPES
    }
    sizes = []
    for model, config in configs.items():
        shape = MODELS.get(model).check(
            config.model.own() | {"vocab_size": CHARACTERS}, seq_len=1024
        )
        sizes.append(MODELS.get(model).num_parameters(shape))
    assert max(sizes) < 1.002 * min(sizes)
    one, other = (config.to_dict() for config in configs.values())
    assert one.pop("model") != other.pop("model")
    assert one == other


def test_losses_survive_an_interruption_and_are_compared_per_seed(
    benchmark, monkeypatch, tiny_set, tmp_path
):
    dataset, cache, ran = Dataset.open(tiny_set), tmp_path / "models.jsonl", []

    def fitted(trial, dataset):
        if len(ran) == 20:
            raise KeyboardInterrupt
        ran.append(trial)
        return bowl(trial)

    monkeypatch.setattr(benchmark, "fitted", fitted)
    with pytest.raises(KeyboardInterrupt):
        benchmark.measure_loss(dataset, cache)
    half = json.loads((tmp_path / "results" / "models.json").read_text())["loss"]
    assert len(half["runs"]) == 20
    monkeypatch.setattr(
        benchmark, "fitted", lambda trial, dataset: ran.append(trial) or bowl(trial)
    )
    benchmark.measure_loss(dataset, cache)
    assert len(ran) == len(set(ran)), "a run was repeated"
    benchmark.keep("speed", {"tokens": 1, "rounds": 0, "rows": []})
    found = json.loads((tmp_path / "results" / "models.json").read_text())
    assert found["loss"]["runs"][:20] == half["runs"], (
        "the runs must be kept when the speed is stored"
    )
    text = (tmp_path / "results" / "models.md").read_text()
    assert "| Muon, T = 4,096, 200 steps | 0.010, 0.020 | 0.010, 0.020 | **+0.000** |" in text
    assert "| Muon, T = 256, 200 steps | 0.010, 0.020 | 0.014, 0.024 | **+0.004** |" in text
    assert "| Muon, T = 256, 800 steps | 0.010 | 0.014 |" in text
    assert "| AdamW, T = 1,024, 200 steps |" in text
    assert "transformer, Muon: 0.004" in text
    assert "eigenstate, AdamW: 0.064" in text
    assert "transformer 1.010, 0.010, 1.010" in text, (
        "losses at half, one and two times the learning rate"
    )


@pytest.mark.slow
def test_models_are_timed_in_turns_with_their_memory(toy, monkeypatch, tiny_set, tmp_path):
    dataset, turns = Dataset.open(tiny_set), []
    monkeypatch.setattr(toy, "SPEED_LENGTHS", (16, 32))

    def json_of(command):
        assert command[:2] == ["python", "--timed"]
        turns.append(command[2:])
        return {
            "tokens_per_s": {"transformer": 100.0, "eigenstate": 250.0}[command[2]],
            "gib": 0.5,
            "steps": 2,
        }

    monkeypatch.setattr(toy, "json_of", json_of)
    for _ in range(2):
        toy.measure_speed(["python"], 2, tmp_path / "models.jsonl")
    order = ["transformer", "eigenstate"]
    assert turns == [
        [model, length]
        for models in (order, order[::-1])
        for length in ("16", "32")
        for model in models
    ], "each model and length once per round"
    assert (
        "| T = 32 | 100 (100 to 100) | 250 (250 to 250) | **2.5 (2.5 to 2.5)** | 0.50 | 0.50 |"
        in (tmp_path / "results" / "models.md").read_text()
    )
    for model in order:
        found = toy.timed(model, 16, dataset)
        assert found["steps"] == 2
        assert found["tokens_per_s"] > 0
    assert toy.fitted(toy.Trial("eigenstate", "adamw", 0.004, 16, 1, 2), dataset)["val_loss"] > 0
