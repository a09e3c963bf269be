"""Two runs of the same steps are compared bit by bit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout.measure.resume.compare import compare_runs
from flatout.training.checkpoint import catalog


@pytest.fixture
def two(fox_run, tmp_path):
    """Two copies of a run of three steps, with a checkpoint at each."""
    run = fox_run[0] / "runs/fox"
    return [shutil.copytree(run, tmp_path / name) for name in ("one", "other")]


def compared(runs):
    return compare_runs(*runs, saved=2, stop=2, end=3)


def at(run, step):
    return catalog.checkpoint_path(run, step)


def change_tensor(checkpoint, file, pick, change):
    path = checkpoint / file
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if pick in name)
    change(tensors[name].reshape(-1))
    save_file(tensors, path)
    return name


def change_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_equal_runs_are_equal_except_for_their_times(two):
    change_json(at(two[1], 3) / catalog.STATE, lambda state: state["values"].update(elapsed_s=1e9))
    found = compared(two)
    assert not found.different
    assert found.first_step is None
    files = [path for step in (2, 3) for path in at(two[0], step).glob("*.safetensors")]
    stored = sum(path.stat().st_size for path in files)
    assert 0.5 * stored < found.num_bytes < stored
    assert found.values > 2 * 10
    assert found.figures >= 3 * 3


def test_one_bit_of_one_weight_is_found(two):
    def zero(values):
        values[0] = 0.0

    def flip_sign(values):
        values.view(torch.int32)[0] ^= -(2**31)

    file = "model-00000.safetensors"
    for run in two:
        change_tensor(at(run, 3), file, "blocks.0", zero)
    name = change_tensor(at(two[1], 3), file, "blocks.0", flip_sign)
    found = compared(two)
    assert found.first_step == 3
    (difference,) = found.different
    assert difference.name == name
    assert "differs in 1 of" in difference.text


def test_weights_are_named_before_optimizer_state(two):
    def add_one(values):
        values += 1

    there = at(two[1], 3)
    moment = change_tensor(there, "optimizer-00000.safetensors", "exp_avg", add_one)
    weight = change_tensor(there, "model-00000.safetensors", "weight", add_one)
    assert [difference.name for difference in compared(two).different] == [weight, moment]


def test_a_missing_tensor_is_a_difference(two):
    change_json(at(two[1], 3) / catalog.INDEX, lambda index: index["tensors"].popitem())
    (difference,) = compared(two).different
    assert difference.text == "exists only in the run without a stop"


def test_values_are_compared_and_short_ones_shown(two):
    def change(state):
        state["values"]["loader"]["position"] += 1
        state["ranks"][0]["rng_torch"] = "ff" + state["ranks"][0]["rng_torch"][2:]

    change_json(at(two[1], 2) / catalog.STATE, change)
    found = compared(two)
    shown = {one.name: one.text for one in found.different}
    position = json.loads((at(two[0], 2) / catalog.STATE).read_text())["values"]["loader"][
        "position"
    ]
    assert shown == {
        "values.loader.position": f"differs: {position} -> {position + 1}",
        "ranks.0.rng_torch": "differs",
    }
    assert found.first_step == 2


def test_the_first_recorded_number_that_differs_is_named(two):
    path = two[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["perf/tokens_per_s"] = 1.0
        if line["step"] >= 2 and "val/loss" in line:
            line["val/loss"] += 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compared(two).different
    assert [(one.step, one.name) for one in found] == [(2, "val/loss"), (3, "val/loss")]
    path.unlink()
    lost = compared(two)
    assert len(lost.different) == lost.figures > 0
