"""A recipe is trained with and without a stop, and every bit is compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import flatout
from flatout.config.trust import memory
from flatout.display import terminal_text
from flatout.errors import ConfigError, DataError
from flatout.measure.resume import compare_runs, prove_resume, steps_of
from flatout.training.checkpoint import catalog

FORGETFUL = '''
from torch import nn

from flatout.models.adapter import adapt


class Forgetful(nn.Module):
    """A model with a counter that no checkpoint contains."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.output = nn.Linear(width, vocab_size)
        self.calls = 0

    def forward(self, idx, targets=None):
        self.calls += self.training
        return self.output(self.tokens(idx)) * (1 + 0.01 * self.calls), None


def build(vocab_size: int, width: int = 8) -> nn.Module:
    return Forgetful(vocab_size, width)


MODEL = adapt(build)
'''


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        (None, 100, (5, 5)),
        (None, None, (5, 5)),
        (None, 7, (3, 4)),
        (None, 2, (1, 1)),
        ("2,3", 100, (2, 3)),
        (" 40 , 1", None, (40, 1)),
        ("5", 100, "--steps '5' is not two numbers"),
        ("5,0", 100, "--steps '5,0' is not two numbers"),
        ("five,5", 100, "Fix: Write --steps 5,5"),
        ("8,8", 10, "needs 16 steps, but the recipe has 10.*--steps 5,5"),
        (None, 1, r"1 step cannot be stopped.*train\.steps=2"),
    ],
)
def test_steps_are_stated_or_fit_the_recipe(tiny_config, text, total, expected):
    config = tiny_config(train__steps=total)
    if isinstance(expected, tuple):
        assert steps_of(text, config) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            steps_of(text, config)


@pytest.mark.slow
def test_a_recipe_that_resumes_exactly_is_proved(tiny_config):
    often = {"train__eval_every": 2, "log__every": 7, "checkpoint__every_steps": 1}
    config = tiny_config(train__steps=40, model__dropout=0.1, optim__kind="muon", **often)
    proof = prove_resume(config, (3, 4))
    assert proof.is_equal, proof.differences
    assert (proof.first_step, proof.differences, proof.causes) == (None, [], [])
    assert proof.tensors > 40
    assert proof.figures >= 7 * 3
    assert terminal_text(proof.display()).startswith("Resuming is exact.\n3 + 4 steps")


@pytest.mark.faults
def test_state_outside_the_state_dict_is_found_and_explained(tiny_config, tmp_path, monkeypatch):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    document = tiny_config(train__steps=6).to_dict()
    document["model"] = {"kind": "forgetful:MODEL", "width": 8}
    proof = prove_resume(flatout.config.schema.validate(document), (2, 2))
    assert not proof.is_equal
    assert proof.first_step == 3
    assert proof.differences[0].startswith("Step 3: train/")
    assert "state outside the state_dict" in proof.causes[0]
    assert "forgetful:MODEL" in proof.causes[-1]
    assert "Possible cause: " in terminal_text(proof.display())
    assert not list(memory().glob("*.json")), "a temporary run stays trusted"


@pytest.mark.slow
def test_an_error_of_the_run_is_raised_as_it_was(tiny_config, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        prove_resume(tiny_config(data__path=str(tmp_path / "nowhere")), (2, 2))
    config = tiny_config(train__steps=None, train__tokens=300)
    with pytest.raises(ConfigError, match=r"needs 10 steps, but the recipe has 3.*--steps 1,2"):
        prove_resume(config, steps_of(None, config))


@pytest.mark.faults
@pytest.mark.parametrize("devices", [None, 2])
def test_the_command_proves_a_recipe(tiny_config, tmp_path, devices):
    recipe = tmp_path / "tiny.yaml"
    config = tiny_config(train__steps=30, train__devices=devices, model__dropout=0.1)
    recipe.write_text(json.dumps(config.to_dict()))
    found = flatout.verify(recipe, resume=True)
    assert found.ok, found.problems
    assert found.resume.figures >= 30
    steps = found.resume.steps_before, found.resume.steps_after
    assert sum(steps) == (10 if devices is None else 11)
    assert "Resuming is exact." in found.summary()


@pytest.fixture
def two(fox_run, tmp_path):
    """Two copies of a run of three steps, with a checkpoint at each."""
    run = fox_run[0] / "runs/fox"
    return [shutil.copytree(run, tmp_path / name) for name in ("one", "other")]


@pytest.fixture
def compared(tiny_config):
    def compare(runs, device="cpu"):
        config = tiny_config(train__device=device)
        return compare_runs(*runs, config, (2, 2, 3), is_forced=False)

    return compare


def at(run: Path, step: int) -> Path:
    return catalog.checkpoint_path(run, step)


def change_tensor(checkpoint, file, change):
    """Change the first tensor of a file, and its digest in the manifest."""
    tensors = load_file(checkpoint / file)
    name = min(tensors)
    change(tensors[name].reshape(-1))
    save_file(tensors, checkpoint / file)

    def forget(manifest):
        manifest["files"][file]["sha256"] = "0" * 64

    change_json(checkpoint / catalog.MANIFEST, forget)
    return name


def change_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_equal_runs_are_equal_except_for_their_times(two, compared):
    change_json(at(two[1], 3) / catalog.STATE, lambda state: state["values"].update(elapsed_s=1e9))
    found = compared(two)
    assert found.is_equal
    assert (found.first_step, found.causes) == (None, [])
    assert found.values > 2 * 10
    assert found.figures >= 3 * 3


def test_one_bit_of_one_weight_is_found_and_weights_come_first(two, compared):
    def flip_sign(values):
        values.view(torch.int32)[0] ^= -(2**31)

    moment = change_tensor(at(two[1], 3), "optimizer-00000.safetensors", flip_sign)
    weight = change_tensor(at(two[1], 3), "model-00000.safetensors", flip_sign)
    found = compared(two)
    assert (found.first_step, found.first_tensor) == (3, weight)
    assert found.differences == [
        f"Checkpoint of step 3: {name} differs." for name in (weight, moment)
    ]


def test_values_are_compared_and_short_ones_shown(two, compared):
    def change(state):
        state["values"]["loader"]["position"] += 1

    position = json.loads((at(two[0], 2) / catalog.STATE).read_text())["values"]["loader"]
    position = position["position"]
    change_json(at(two[1], 2) / catalog.STATE, change)
    found = compared(two)
    assert found.differences == [
        f"Checkpoint of step 2: values.loader.position differs: {position} -> {position + 1}."
    ]
    assert found.first_step == 2
    assert "before the stop" in found.causes[0]
    assert "train.deterministic=true" in compared(two, device="cuda").causes[0]


def test_the_first_recorded_number_that_differs_is_named(two, compared):
    path = two[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["perf/tokens_per_s"] = 1.0
        if line["step"] >= 2 and "val/loss" in line:
            line["val/loss"] += 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compared(two)
    assert [text.split(" differs")[0] for text in found.differences] == [
        "Step 2: val/loss",
        "Step 3: val/loss",
    ]
    path.unlink()
    lost = compared(two)
    assert lost.differences[-1] == f"... and {lost.figures - 5} more."
