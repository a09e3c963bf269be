"""A recipe is trained with and without a stop, and every bit is compared."""

import json
import shutil

import pytest

import flatout
from flatout.config.trust import memory
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
        (" 40 , 1", None, (40, 1)),
        ("5", 100, "--steps '5' is not two numbers"),
        ("5,0", 100, "--steps '5,0' is not two numbers"),
        ("five,5", 100, "Fix: Write --steps 5,5"),
        ("8,8", 10, "needs 16 steps, but the recipe has 10.*--steps 5,5"),
        (None, 1, r"1 step cannot be stopped.*train\.steps=2"),
    ],
)
def test_steps_are_stated_or_fit_the_recipe(text, total, expected):
    if isinstance(expected, tuple):
        assert steps_of(text, total) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            steps_of(text, total)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_recipe_that_resumes_exactly_is_proved(tiny_config):
    often = {"train__eval_every": 2, "log__every": 7, "checkpoint__every_steps": 1}
    config = tiny_config(train__steps=40, model__dropout=0.1, optim__kind="muon", **often)
    proof = prove_resume(config, (3, 4))
    assert proof.is_equal, proof.differences
    assert (proof.first_step, proof.differences) == (None, [])
    assert (proof.steps_before, proof.steps_after) == (3, 4)
    assert proof.values >= 7 * 3


@pytest.mark.faults
def test_state_outside_the_state_dict_is_found_and_explained(tiny_config, tmp_path, monkeypatch):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    document = tiny_config(train__steps=6).to_dict()
    document["model"] = {"kind": "forgetful:MODEL", "width": 8}
    proof = prove_resume(flatout.config.schema.validate(document), (2, 2))
    assert (proof.is_equal, proof.first_step) == (False, 3)
    assert proof.differences[0].startswith("Step 3, metrics.jsonl: train/")
    assert "state outside the state_dict" in proof.display().notes[-1]
    assert not list(memory().glob("*.json")), "a temporary run stays trusted"


@pytest.mark.thorough
@pytest.mark.slow
def test_an_error_of_the_run_is_raised_as_it_was(tiny_config, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        prove_resume(tiny_config(data__path=str(tmp_path / "nowhere")), (2, 2))
    config = tiny_config(train__steps=None, train__tokens=300)
    with pytest.raises(ConfigError, match=r"needs 10 steps, but the recipe has 3.*--steps 1,2"):
        prove_resume(config, steps_of(None, None))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("devices", "total", "asked", "steps"),
    [
        (None, 30, None, (5, 5)),
        (2, 30, "2,1", (3, 2)),
        (2, 30, "2,4", (3, 4)),
        (2, 4, "2,2", (3, 1)),
    ],
)
def test_the_command_proves_a_recipe(tiny_config, tmp_path, devices, total, asked, steps):
    """Several processes stop one step after they are asked to."""
    recipe = tmp_path / "tiny.yaml"
    config = tiny_config(train__steps=total, train__devices=devices, model__dropout=0.1)
    recipe.write_text(json.dumps(config.to_dict()))
    found = flatout.verify(recipe, resume=True, steps=asked)
    assert found.ok, found.problems
    assert (found.resume.steps_before, found.resume.steps_after) == steps
    assert found.summary().startswith(f"Resuming is exact.\n{steps[0]} + {steps[1]} steps")


@pytest.mark.faults
def test_a_run_that_ends_before_it_can_be_stopped_is_an_error(tiny_config):
    with pytest.raises(ConfigError, match=r"several processes stop one step later.*train\.steps=4"):
        prove_resume(tiny_config(train__steps=3, train__devices=2), (2, 1))


def test_the_first_difference_is_named_with_its_step_and_file(fox_run, tmp_path):
    """Two copies of a run of three steps, with a checkpoint at each."""
    one, other = (shutil.copytree(fox_run[0] / "runs/fox", tmp_path / n) for n in ("one", "other"))

    def change(path, edit):
        document = json.loads(path.read_text())
        edit(document)
        path.write_text(json.dumps(document))

    at = {step: catalog.checkpoint_path(other, step) for step in (2, 3)}
    change(at[3] / catalog.STATE, lambda state: state["values"].update(elapsed_s=1e9))
    path = other / "metrics.jsonl"
    lines = [
        json.loads(line) | {"perf/tokens_per_s": 1.0} for line in path.read_text().splitlines()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    equal = compare_runs(one, other)
    assert (equal["is_equal"], equal["first_step"]) == (True, None)
    assert equal["values"] >= 3 * 3

    for file in ("optimizer-00000.safetensors", "model-00000.safetensors"):
        change(
            at[3] / catalog.MANIFEST,
            lambda m, f=file: [e.update(sha256="0" * 64) for e in m["files"] if e["name"] == f],
        )
    found = compare_runs(one, other)
    assert found["first_step"] == 3
    assert found["differences"][0] == "Step 3, model-00000.safetensors differs."
    assert len(found["differences"]) == 2

    change(at[2] / catalog.STATE, lambda state: state["values"]["loader"].update(position=-7))
    found = compare_runs(one, other)
    assert found["differences"][0].startswith(
        "Step 2, state.json: values.loader.position differs: "
    )
    path.unlink()
    lost = compare_runs(one, other)
    assert lost["first_step"] == 1
    assert lost["differences"][-1].startswith("and ")
