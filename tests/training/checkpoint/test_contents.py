"""What is inside a checkpoint's files is checked without torch."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flatout.errors import CheckpointError
from flatout.files import sha256
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.contents import TensorFile, content_problems, problems_of


@pytest.fixture
def checkpoint(fox_run, tmp_path):
    """A copy of a real checkpoint."""
    return shutil.copytree(fox_run[0] / "runs/fox/checkpoints/step-3", tmp_path / "step-3")


def rewrite(checkpoint, name, change):
    """Change a JSON file of a checkpoint, and state its new digest in the manifest."""
    path, manifest = checkpoint / name, checkpoint / catalog.MANIFEST
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    listed = json.loads(manifest.read_text())
    listed["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest.write_text(json.dumps(listed))


def first_tensor(index):
    return next(name for name, entry in index["tensors"].items() if len(entry["shape"]) == 2)


def test_a_whole_checkpoint_has_no_problems(checkpoint):
    assert problems_of(checkpoint) == []


def test_a_damaged_file_is_named_before_its_content_is_read(checkpoint):
    (checkpoint / "model-00000.safetensors").write_bytes(b"torn")
    (problem,) = problems_of(checkpoint)
    assert "model-00000.safetensors has 4 bytes" in problem


def renamed(index):
    index["tensors"]["model/other"] = index["tensors"].pop(first_tensor(index))


def another_shape(index):
    entry = index["tensors"][first_tensor(index)]
    entry["shape"] = entry["slices"][0]["shape"] = entry["shape"][::-1]


def another_dtype(index):
    index["tensors"][first_tensor(index)]["dtype"] = "float64"


def uncovered(index):
    entry = index["tensors"][first_tensor(index)]
    entry["shape"] = [entry["shape"][0] + 1, entry["shape"][1]]


def outside(index):
    entry = index["tensors"][first_tensor(index)]
    entry["slices"][0]["offset"] = [1, 0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (renamed, "model-00000.safetensors has no tensor model/other."),
        (another_shape, "the index says F32"),
        (another_dtype, "the index says F64"),
        (uncovered, "do not cover it"),
        (outside, "do not cover it"),
        (lambda index: index.pop("tensors"), "index.json is damaged"),
    ],
    ids=["name", "shape", "dtype", "uncovered", "outside", "no tensors"],
)
def test_an_index_that_does_not_fit_the_files_is_a_problem(checkpoint, change, problem):
    rewrite(checkpoint, catalog.INDEX, change)
    assert problem in content_problems(checkpoint)[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": 4}, "step is 4 in the checkpoint of step 3"),
        ({"world_size": 2}, "the states of 1 of 2 ranks"),
        ({"ranks": None}, "state.json is damaged"),
    ],
    ids=["step", "world size", "ranks"],
)
def test_a_state_that_does_not_fit_is_a_problem(checkpoint, change, problem):
    rewrite(checkpoint, catalog.STATE, lambda state: state.update(change))
    assert problem in problems_of(checkpoint)[0]


def test_tensors_are_read_as_torch_wrote_them(tmp_path):
    wanted = {
        "a": torch.arange(7, dtype=torch.float32),
        "b": torch.tensor(2.5, dtype=torch.bfloat16),
        "c": torch.zeros(0),
    }
    save_file(wanted, tmp_path / "x.safetensors")
    found = TensorFile(tmp_path / "x.safetensors")
    assert found.tensors["b"].dtype == "BF16"
    for name, tensor in wanted.items():
        stored = tensor.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(found.read(name), stored)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\4\0\0\0\0\0\0\0{"]
)
def test_another_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged"):
        TensorFile(path)
    with pytest.raises(CheckpointError, match="Cannot read"):
        TensorFile(tmp_path / "none")


def matrix(index):
    return next(entry for entry in index["tensors"].values() if len(entry["shape"]) == 2)


def flat_slice(index):
    matrix(index)["slices"][0]["offset"] = [0]


def no_shape(index):
    matrix(index)["shape"] = []


def half_a_row(index):
    matrix(index)["shape"][0] = 0.5


@pytest.mark.parametrize("change", [flat_slice, no_shape, half_a_row])
def test_an_index_whose_shapes_make_no_sense_is_damaged(checkpoint, change):
    rewrite(checkpoint, catalog.INDEX, change)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged: (?!ValidationError)"):
        catalog.read_index(checkpoint)
