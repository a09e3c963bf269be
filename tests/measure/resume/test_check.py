"""A recipe is trained with and without a stop, and what differs is explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flatout.config.schema import validate
from flatout.config.trust import memory
from flatout.errors import CheckpointError, ConfigError, DataError, HardwareError, RunFailed
from flatout.measure.child import Told
from flatout.measure.resume import check
from flatout.measure.resume.check import Job, error_of, proof_of, prove_resume, steps_of
from flatout.measure.resume.compare import Comparison, Difference
from flatout.measure.resume.proof import FIXED
from flatout.progress import SILENT
from flatout.storage.json_io import read_json


@pytest.fixture
def in_this_process(monkeypatch):
    """Train in this process instead of a fresh one, which takes seconds to start."""

    def run(command, count):
        job = Job.model_validate(read_json(Path(command[-1])))
        return check.train(validate(job.config), job), ""

    monkeypatch.setattr(check, "_run", run)


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
    ],
)
def test_steps_are_stated_or_fit_the_recipe(tiny_config, text, total, expected):
    assert steps_of(text, tiny_config(train__steps=total)) == expected


@pytest.mark.parametrize(
    ("text", "total", "message"),
    [
        ("5", 100, "--steps '5' is not two numbers"),
        ("5,0", 100, "--steps '5,0' is not two numbers"),
        ("five,5", 100, "Fix: Write --steps 5,5"),
        ("8,8", 10, "needs 16 steps, but the recipe has 10.*--steps 5,5"),
        (None, 1, r"1 step cannot be stopped.*train\.steps=2"),
    ],
)
def test_steps_that_cannot_be_stopped_between_are_rejected(tiny_config, text, total, message):
    with pytest.raises(ConfigError, match=message):
        steps_of(text, tiny_config(train__steps=total))


@pytest.mark.slow
def test_a_recipe_that_resumes_exactly_is_proved(in_this_process, tiny_config):
    often = {"train__eval_every": 2, "log__every": 7, "checkpoint__every_steps": 1}
    config = tiny_config(train__steps=40, model__dropout=0.1, optim__kind="muon", **often)
    proof = prove_resume(config, (3, 4))
    assert proof.is_equal, proof.text()
    assert (proof.first_step, proof.differences, proof.causes) == (None, [], [])
    assert proof.tensors > 40
    assert proof.figures >= 7 * 3
    assert proof.text().startswith("Resuming is exact.\n3 + 4 steps")


@pytest.mark.slow
def test_on_a_gpu_kernels_are_made_deterministic(in_this_process, tiny_config, monkeypatch):
    monkeypatch.setattr(check, "pick_device", lambda device, machine: ("cuda", ""))
    said = SimpleNamespace(task=SILENT.task, say=[].append)
    try:
        proof = prove_resume(tiny_config(train__steps=2), (1, 1), progress=said)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert proof.made_deterministic
    assert proof.deterministic
    assert proof.is_equal
    assert said.say.__self__ == [FIXED]
    assert "Checked with train.deterministic=true" in proof.text()


@pytest.mark.slow
def test_state_outside_the_state_dict_is_found_and_explained(
    in_this_process, tiny_config, tmp_path, monkeypatch
):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    document = tiny_config(train__steps=6).to_dict()
    document["model"] = {"kind": "forgetful:MODEL", "width": 8}
    try:
        proof = prove_resume(validate(document), (2, 2))
    finally:
        sys.modules.pop("forgetful", None)
    assert not proof.is_equal
    assert proof.first_step == 3
    assert proof.first_tensor.startswith("model/")
    assert proof.differences[0].startswith("Step 3: train/")
    assert "state outside the state_dict" in proof.causes[0]
    assert "forgetful:MODEL" in proof.causes[-1]
    assert "Possible cause: " in proof.text()
    assert not list(memory().glob("*.json")), "a temporary run stays trusted"


@pytest.mark.slow
def test_an_error_of_the_run_is_raised_as_it_was(in_this_process, tiny_config, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        prove_resume(tiny_config(data__path=str(tmp_path / "nowhere")), (2, 2))
    config = tiny_config(train__steps=None, train__tokens=300)
    with pytest.raises(ConfigError, match=r"needs 10 steps, but the recipe has 3.*--steps 1,2"):
        prove_resume(config, steps_of(None, config))


def test_a_process_that_dies_is_a_failed_run(monkeypatch, tiny_config):
    monkeypatch.setattr(check, "PROGRAM", "raise SystemExit('no memory')")
    with pytest.raises(RunFailed, match="ended with code 1: no memory"):
        prove_resume(tiny_config(), (2, 2))


def test_errors_keep_their_kind_and_a_full_disk_gets_its_own_fix(tmp_path):
    def kind_of(name, what="It is wrong."):
        return error_of(Told(error=name, what=what, fix="Do this."), tmp_path)

    assert type(kind_of("CheckpointError")) is CheckpointError
    assert kind_of("CheckpointError").fix == "Do this."
    assert type(kind_of("Interrupted")) is RunFailed
    full = kind_of("HardwareError", f"the disk of {tmp_path}/whole has 1 MiB free.")
    assert type(full) is HardwareError
    assert "TMPDIR" in full.fix


def compared(*names):
    """Return the comparison of two runs whose values of these names differ at the end."""
    return Comparison(5, 10, different=[Difference(10, "value", name, "differs") for name in names])


def test_few_differences_of_each_kind_are_sentences(tiny_config):
    found = compared(*(f"values.{number}" for number in range(7)))
    loss = Difference(6, "figure", "train/loss", "differs: 1.0 -> 2.0")
    found.different[:0] = [loss, Difference(10, "tensor", "model/a", "differs")]
    proof = proof_of(found, tiny_config(train__device="cpu"))
    assert proof.differences[:2] == [
        "Step 6: train/loss differs: 1.0 -> 2.0.",
        "Checkpoint of step 10: model/a differs.",
    ]
    assert len(proof.differences) == 2 + 5 + 1
    assert proof.differences[-1] == "... and 2 more like these."
    assert (proof.first_step, proof.first_tensor) == (6, "model/a")


def test_kernels_of_a_gpu_that_sum_in_no_fixed_order_are_named(tiny_config):
    def proof(*names, deterministic):
        config = tiny_config(train__device="cuda", train__deterministic=deterministic)
        return proof_of(compared(*names), config)

    different = proof("values.best.val_loss", deterministic=False)
    assert not different.is_equal
    assert "train.deterministic=true" in different.causes[0]
    assert "kernels" not in proof("values.best.val_loss", deterministic=True).text()
    equal = proof(deterministic=False)
    assert equal.is_equal
    assert "in another run" in equal.text()
    assert "another time" not in proof(deterministic=True).text()


@pytest.mark.faults
@pytest.mark.parametrize("devices", [None, 2])
def test_the_command_proves_a_recipe_in_fresh_processes(tiny_config, tmp_path, devices):
    recipe = tmp_path / "tiny.yaml"
    config = tiny_config(train__steps=30, train__devices=devices, model__dropout=0.1)
    recipe.write_text(json.dumps(config.to_dict()))
    done = subprocess.run(
        [sys.executable, "-m", "flatout", "verify", "--resume", str(recipe), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["resume"]["is_equal"] is True
    assert found["resume"]["figures"] >= 30
    steps = found["resume"]["steps_before"], found["resume"]["steps_after"]
    assert sum(steps) == (10 if devices is None else 11)
    assert "Resuming is exact." in done.stderr
