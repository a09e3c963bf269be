"""Safetensors files that are written tensor by tensor."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flatout.errors import CheckpointError
from flatout.inference.export.shards import INDEX, Planned, write_safetensors, write_shards
from flatout.progress import SILENT

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.randn(5, 4).to(torch.bfloat16),
    "c": torch.randn(3).half(),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "turned": torch.randn(3, 2).T,
    "flags": torch.tensor([True, False]),
}


def planned(tensors):
    return [
        Planned(name, tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]


def write(function, *arguments):
    with SILENT.task("Writing") as task:
        function(*arguments, task)


def test_the_library_reads_what_was_written(tmp_path):
    write(write_safetensors, tmp_path / "x.safetensors", planned(TENSORS))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_small_model_is_one_file_without_an_index(tmp_path):
    write(write_shards, tmp_path, planned(TENSORS), 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_stay_within_the_limit_unless_one_tensor_is_larger(tmp_path):
    tensors = {
        name: torch.full((size,), 1.0) for name, size in zip("abcd", (10, 10, 100, 5), strict=True)
    }
    write(write_shards, tmp_path, planned(tensors), 100)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 500},
        "weight_map": {
            "a": "model-00001-of-00003.safetensors",
            "b": "model-00001-of-00003.safetensors",
            "c": "model-00002-of-00003.safetensors",
            "d": "model-00003-of-00003.safetensors",
        },
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_a_tensor_that_differs_from_its_plan_is_a_bug(tmp_path):
    wrong = [Planned("a", torch.float32, (2,), lambda: torch.zeros(3))]
    with pytest.raises(AssertionError, match="a"):
        write(write_safetensors, tmp_path / "x.safetensors", wrong)


def test_a_type_that_the_format_lacks_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"c has the type torch\.complex64"):
        write(
            write_safetensors,
            tmp_path / "x.safetensors",
            planned({"c": torch.zeros(1, dtype=torch.complex64)}),
        )
